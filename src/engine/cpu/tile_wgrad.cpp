#include <algorithm>

#include "engine/cpu/tile_work.h"
#include "model/bias_sums.h"

// Weight gradients: dW2 = dyg^T a and dW1 = dz^T xg, summed along an expert's rows in placement order; and those of
// biases, which the tiles of the first columns make.
namespace uniep::cpu {
namespace {

// Rows are taken in steps of this many; the step reaches into the padding, which is zero. It is the depth of one matrix
// instruction on the GPU, and the same for every tile shape.
constexpr int64_t kRowStep = 16;

void write_row(const Call& call, const float* sums, void* gradient, int64_t offset, int64_t count) {
  switch (call.numerics.weight_gradient) {
    case WeightGradient::kBFloat16:
      call.kernels.round_row(sums, static_cast<BFloat16*>(gradient) + offset, count);
      break;
    case WeightGradient::kFloat32:
      std::copy_n(sums, count, static_cast<float*>(gradient) + offset);
      break;
    case WeightGradient::kMainGrad:
      call.kernels.add_row(sums, static_cast<float*>(gradient) + offset, count);
      break;
  }
}

struct Columns {
  int64_t first, count;
};

// db1 = sum of dz, db2 = sum of dyg, each row times the router's weight where that multiplies b2: of some columns, in
// the order of model/bias_sums.h.
void bias_gradient(Call& call, const RankProgram& p, const Task& task, Columns of, AgentScratch& scratch) {
  const auto [column, count] = of;
  const bool fc2 = task.stage == Stage::kWgradFc2;
  const RankBuffers& own = call.ranks[p.rank];
  const int32_t expert = p.first_expert + task.expert;
  const int64_t columns = fc2 ? p.wgrad_fc2.rows : p.wgrad_fc1.rows;
  const bool weighs = fc2 && call.numerics.router_weight == RouterWeight::kOutput;
  std::vector<float> sums(static_cast<std::size_t>(count), 0.0f);
  const int64_t first = p.segment_start[expert], end = first + p.expert_rows[expert];
  for (int64_t begin = first; begin < end; begin += kBiasRows) {
    scratch.accumulators.assign(static_cast<std::size_t>(count), 0.0f);
    for (int64_t row = begin; row < std::min(begin + kBiasRows, end); ++row) {
      const BFloat16* const values = (fc2 ? own.gathered[0] : own.dz) + row * columns + column;
      call.kernels.add_weighted(values, weighs ? p.rows[row].prob : 1.0f, scratch.accumulators.data(), count);
    }
    call.kernels.add_row(scratch.accumulators.data(), sums.data(), count);
  }
  write_row(call, sums.data(), fc2 ? own.db2[task.expert] : own.db1[task.expert], column, count);
}

}  // namespace

void run_wgrad_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  const bool fc2 = task.stage == Stage::kWgradFc2;
  const WgradGrid& grid = fc2 ? p.wgrad_fc2 : p.wgrad_fc1;
  RankBuffers& own = call.ranks[p.rank];
  const int64_t row = static_cast<int64_t>(task.m) * grid.tile_m, column = static_cast<int64_t>(task.n) * grid.tile_n;
  const int64_t height = std::min<int64_t>(grid.tile_m, grid.rows - row);
  const int64_t width = std::min<int64_t>(grid.tile_n, grid.columns - column);
  const int32_t expert = p.first_expert + task.expert;
  // Nothing is added, not even +0, which would make -0 +0.
  if (p.expert_rows[expert] == 0 && call.numerics.weight_gradient == WeightGradient::kMainGrad) return;
  const int64_t first = p.segment_start[expert];
  const int64_t depth = round_up(p.expert_rows[expert], kRowStep);

  // A rank without a row has no memory for rows.
  const auto at = [&](const BFloat16* rows, int64_t offset) { return depth == 0 ? rows : rows + offset; };
  const BFloat16* left = at(fc2 ? own.gathered[0] : own.dz, first * grid.rows + row);
  const BFloat16* right = at(fc2 ? own.activation : own.xg, first * grid.columns + column);
  const TileShape tile = call.schedule.tile_of(fc2 ? GemmStage::kWgradFc2 : GemmStage::kWgradFc1);
  scratch.accumulators.resize(height * width);
  call.kernels.gemm({.a = {left, grid.rows, false},
                     .b = {right, grid.columns, false},
                     .m = height,
                     .n = width,
                     .k = depth,
                     .k_block = static_cast<int64_t>(tile.k) * tile.stages,
                     .c = scratch.accumulators.data(),
                     .ldc = width},
                    scratch.gemm);
  for (int64_t i = 0; i < height; ++i) {
    const bool up = !fc2 && row + i >= call.shape.intermediate;  // only where there is a gate
    void* const gradient = fc2 ? own.dw2[task.expert] : up ? own.dw1_up[task.expert] : own.dw1[task.expert];
    const int64_t line = row + i - (up ? call.shape.intermediate : 0);
    write_row(call, scratch.accumulators.data() + i * width, gradient, line * grid.columns + column, width);
  }
  if (call.numerics.bias && column == 0) bias_gradient(call, p, task, {row, height}, scratch);
}

}  // namespace uniep::cpu
