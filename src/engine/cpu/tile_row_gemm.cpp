#include <algorithm>
#include <iterator>

#include "engine/cpu/tile_work.h"
#include "engine/workspace.h"
#include "model/bias_sums.h"

// The GEMMs over rows, with their epilogues: FC1 and the activation, FC2, dgrad FC2 and the activation's gradient,
// dgrad FC1.
namespace uniep::cpu {
namespace {

// Column tiles begin at multiples of 64, so a chunk of dprob belongs to one tile.
static_assert(kProbColumns == 64, "first-GEMM tiles are multiples of 64 columns wide");

struct Tile {
  int32_t expert;  // local
  RowRange rows;
  int64_t column, columns;
  int64_t height() const { return rows.end - rows.begin; }
};

int64_t pipeline_depth(const Call& call, GemmStage stage) {
  const TileShape tile = call.schedule.tile_of(stage);
  return static_cast<int64_t>(tile.k) * tile.stages;
}

Tile first_tile(const Call& call, const RankProgram& p, const Task& task) {
  const int64_t width = first_tile_columns(call.schedule, call.numerics, p.direction);
  const int64_t column = task.n * width;
  return {task.expert, rows_of_block(p, p.first_expert + task.expert, task.m), column,
          std::min(width, call.shape.intermediate - column)};
}

Tile second_tile(const RankProgram& p, const Task& task) {
  const int32_t chunk = chunk_of_tile(p, task.n);
  const int64_t column = p.chunk_column[chunk] + static_cast<int64_t>(task.n - p.chunk_tile[chunk]) * p.second_tile_n;
  return {task.expert, rows_of_block(p, p.first_expert + task.expert, task.m), column,
          std::min<int64_t>(p.second_tile_n, p.chunk_column[chunk + 1] - column)};
}

// z = W1 xg + b1 for the gate columns and the matching up columns, if any; then a from the rounded z.
void fc1(Call& call, const RankProgram& p, const Tile& tile, AgentScratch& scratch) {
  const int64_t hidden = call.shape.hidden, intermediate = call.shape.intermediate;
  RankBuffers& own = call.ranks[p.rank];
  const int halves = call.gated ? 2 : 1;
  const int64_t width = halves * tile.columns;
  scratch.accumulators.resize(tile.height() * width);
  const GemmOperand xg{own.gathered[0] + tile.rows.begin * hidden, hidden, true};
  const BFloat16* const w1[2] = {own.w1[tile.expert], own.w1_up[tile.expert]};
  for (int half = 0; half < halves; ++half) {
    const GemmOperand weights{w1[half] + tile.column * hidden, hidden, true};
    call.kernels.gemm({.a = xg,
                       .b = weights,
                       .m = tile.height(),
                       .n = tile.columns,
                       .k = hidden,
                       .k_block = pipeline_depth(call, GemmStage::kFc1),
                       .c = scratch.accumulators.data() + half * tile.columns,
                       .ldc = width},
                      scratch.gemm);
  }
  const bool weighs_output = call.numerics.router_weight == RouterWeight::kOutput;
  for (int64_t i = 0; i < tile.height(); ++i) {
    const int64_t row = tile.rows.begin + i;
    BFloat16* gate = own.z + row * call.z_columns + tile.column;
    BFloat16* up = call.gated ? gate + intermediate : nullptr;
    float* const sums = scratch.accumulators.data() + i * width;
    for (int half = 0; call.numerics.bias && half < halves; ++half) {
      const BFloat16* const bias = own.b1[tile.expert] + half * intermediate + tile.column;
      call.kernels.add_weighted(bias, 1.0f, sums + half * tile.columns, tile.columns);
    }
    call.kernels.round_row(sums, gate, tile.columns);
    if (call.gated) call.kernels.round_row(sums + tile.columns, up, tile.columns);
    call.activation.activate(call.activation_parameters,
                             {gate, up, weighs_output ? 1.0f : p.rows[row].prob, tile.columns},
                             own.activation + row * intermediate + tile.column);
  }
}

// Of up to kBiasDotColumns columns.
float bias_dot(const BFloat16* dy, const BFloat16* b2, int64_t columns) {
  float lanes[kBiasDotColumns / kBiasLaneColumns] = {};
  for (int64_t column = 0; column < columns; ++column) {
    float& lane = lanes[column / kBiasLaneColumns];
    lane = add_bias_term(lane, dy[column], b2[column]);
  }
  for (std::size_t half = std::size(lanes) / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] = add(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// Where the router's weight multiplies b2, too, dy . b2 is a part of dprob. The tiles of the first columns make it.
void add_bias_sums(const Call& call, const RankBuffers& own, const Tile& tile) {
  if (!internal::weighs_bias(call.numerics) || tile.column > 0) return;
  const int64_t hidden = call.shape.hidden, behind = divide_up(call.shape.intermediate, kProbColumns);
  for (int64_t row = tile.rows.begin; row < tile.rows.end; ++row) {
    for (int64_t part = 0; part * kBiasDotColumns < hidden; ++part) {
      const int64_t column = part * kBiasDotColumns;
      own.prob_chunks[(behind + part) * own.prob_stride + row] =
          bias_dot(own.gathered[0] + row * hidden + column, own.b2[tile.expert] + column,
                   std::min<int64_t>(kBiasDotColumns, hidden - column));
    }
  }
}

// da = dyg W2, kept in fp32; then a again, dz and the dprob chunk sums.
void dgrad_fc2(Call& call, const RankProgram& p, const Tile& tile, AgentScratch& scratch) {
  const int64_t hidden = call.shape.hidden, intermediate = call.shape.intermediate;
  RankBuffers& own = call.ranks[p.rank];
  scratch.accumulators.resize(tile.height() * tile.columns);
  const GemmOperand dyg{own.gathered[0] + tile.rows.begin * hidden, hidden, true};
  const GemmOperand weights{own.w2[tile.expert] + tile.column, intermediate, false};
  call.kernels.gemm({.a = dyg,
                     .b = weights,
                     .m = tile.height(),
                     .n = tile.columns,
                     .k = hidden,
                     .k_block = pipeline_depth(call, GemmStage::kDgradFc2),
                     .c = scratch.accumulators.data(),
                     .ldc = tile.columns},
                    scratch.gemm);
  const int64_t first_chunk = tile.column / kProbColumns, chunks = divide_up(tile.columns, kProbColumns);
  scratch.chunk_sums.resize(chunks);
  add_bias_sums(call, own, tile);
  for (int64_t i = 0; i < tile.height(); ++i) {
    const int64_t row = tile.rows.begin + i;
    const BFloat16* gate = own.z + row * call.z_columns + tile.column;
    BFloat16* dgate = own.dz + row * call.z_columns + tile.column;
    call.activation.gradient(call.activation_parameters,
                             {gate, call.gated ? gate + intermediate : nullptr, p.rows[row].prob, tile.columns},
                             {.da = scratch.accumulators.data() + i * tile.columns,
                              .a = own.activation + row * intermediate + tile.column,
                              .dgate = dgate,
                              .dup = call.gated ? dgate + intermediate : nullptr,
                              .chunk_sums = scratch.chunk_sums.data()});
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      own.prob_chunks[(first_chunk + chunk) * own.prob_stride + row] = scratch.chunk_sums[chunk];
    }
  }
  if (call.fault == Fault::kSkippedPadding) return;
  for (int64_t row = tile.rows.end; row < tile.rows.padded_end; ++row) {  // both operands of the weight gradients
    BFloat16* dgate = own.dz + row * call.z_columns + tile.column;
    std::fill_n(own.activation + row * intermediate + tile.column, tile.columns, BFloat16{0});
    std::fill_n(dgate, tile.columns, BFloat16{0});
    if (call.gated) std::fill_n(dgate + intermediate, tile.columns, BFloat16{0});
  }
}

// o = W2 a + b2, then times the router's weight where that is its place, or dxg = dz W1; rounded into local rows
// (staged) or straight into the source rank's slots.
void second_gemm(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  const int64_t hidden = call.shape.hidden, intermediate = call.shape.intermediate;
  const bool forward = p.direction == Direction::kForward;
  const Tile tile = second_tile(p, task);
  RankBuffers& own = call.ranks[p.rank];
  scratch.accumulators.resize(tile.height() * tile.columns);
  const int64_t depth = forward ? intermediate : call.z_columns;
  const GemmOperand rows{(forward ? own.activation : own.dz) + tile.rows.begin * depth, depth, true};
  const GemmOperand weights =
      forward ? GemmOperand{own.w2[tile.expert] + tile.column * intermediate, intermediate, true}
              : GemmOperand{own.w1[tile.expert] + tile.column, hidden, false,
                            call.gated ? own.w1_up[tile.expert] + tile.column : nullptr, call.gated ? intermediate : 0};
  call.kernels.gemm({.a = rows,
                     .b = weights,
                     .m = tile.height(),
                     .n = tile.columns,
                     .k = depth,
                     .k_block = pipeline_depth(call, forward ? GemmStage::kFc2 : GemmStage::kDgradFc1),
                     .c = scratch.accumulators.data(),
                     .ldc = tile.columns},
                    scratch.gemm);
  const bool weighs_output = forward && call.numerics.router_weight == RouterWeight::kOutput;
  for (int64_t i = 0; i < tile.height(); ++i) {
    const int64_t row = tile.rows.begin + i;
    const RowSource source = p.rows[row];
    float* const sums = scratch.accumulators.data() + i * tile.columns;
    if (forward && call.numerics.bias) {
      call.kernels.add_weighted(own.b2[tile.expert] + tile.column, 1.0f, sums, tile.columns);
    }
    BFloat16* out = p.epilogue_combine ? slot_of(call, source.rank, source.token, source.slot, tile.column)
                                       : own.output_rows + row * hidden + tile.column;
    if (weighs_output) {
      call.kernels.weigh_row(sums, source.prob, out, tile.columns);
    } else {
      call.kernels.round_row(sums, out, tile.columns);
    }
  }
}

}  // namespace

BFloat16* slot_of(Call& call, int32_t destination, int32_t token, int64_t slot, int64_t column) {
  return call.ranks[destination].slots + (token * call.slot_count + slot) * call.shape.hidden + column;
}

void run_row_gemm_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  if (task.stage == Stage::kSecondGemm) return second_gemm(call, p, task, scratch);
  const Tile tile = first_tile(call, p, task);
  if (p.direction == Direction::kForward) {
    fc1(call, p, tile, scratch);
  } else {
    dgrad_fc2(call, p, tile, scratch);
  }
}

}  // namespace uniep::cpu
