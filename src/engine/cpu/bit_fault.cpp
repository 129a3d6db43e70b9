#include "engine/cpu/bit_fault.h"

#include <algorithm>

#include "engine/cpu/random.h"
#include "engine/cpu/tile_work.h"
#include "model/elementwise.h"

namespace uniep::cpu {
namespace {

constexpr int kSteadyBit = 12;

struct Spot {
  void* bytes = nullptr;  // one bf16, or an fp32 gradient
  bool is_float = false;
};

struct Choice : Random {
  Choice(uint64_t seed, bool is_steady) : Random(seed), steady(is_steady) {}
  bool steady;
};

// One of [begin, end).
int64_t column_in(Choice& random, int64_t begin, int64_t end) {
  return random.steady ? begin : begin + static_cast<int64_t>(random.below(end - begin));
}

Spot dispatched(Call& call, const RankProgram& p, const Task& task, Choice& random) {
  RankBuffers& own = call.ranks[p.rank];
  const bool pull = task.stage == Stage::kPull;
  const RowRange range = pull ? rows_of_dispatch(p, task) : rows_of_block(p, p.first_expert + task.expert, task.m);
  if (range.end <= range.begin) return {};
  int64_t row = column_in(random, range.begin, range.end);
  while (row < range.end && !is_primary_row(p, static_cast<int32_t>(row))) ++row;  // others belong to other tiles
  if (row == range.end) return {};
  BFloat16* const rows = own.gathered[pull ? operand_of(p, task) : task.n];
  return {rows + row * call.shape.hidden + column_in(random, 0, call.shape.hidden)};
}

Spot first_gemm(Call& call, const RankProgram& p, const Task& task, Choice& random) {
  RankBuffers& own = call.ranks[p.rank];
  const int64_t width = first_tile_columns(call.schedule, call.numerics, p.direction), begin = task.n * width;
  const RowRange range = rows_of_block(p, p.first_expert + task.expert, task.m);
  if (range.end <= range.begin) return {};
  const int64_t row = column_in(random, range.begin, range.end);
  const int64_t column = column_in(random, begin, std::min(begin + width, call.shape.intermediate));
  BFloat16* const rows = p.direction == Direction::kForward ? own.z : own.dz;
  return {rows + row * call.z_columns + column};
}

// Where a row of the tile lies behind it: on its way to the second half of the combine, or at its source.
Spot returned(Call& call, const RankProgram& p, const Task& task, Choice& random) {
  const bool sent = task.stage == Stage::kSend || p.epilogue_combine;
  const RowRange range = rows_of_block(p, p.first_expert + task.expert, task.m);
  if (range.end <= range.begin) return {};
  int64_t begin = 0, end = 0;
  if (task.stage == Stage::kSend) {
    begin = p.chunk_column[task.n];
    end = p.chunk_column[task.n + 1];
  } else {
    const int32_t chunk = chunk_of_tile(p, task.n);
    begin = p.chunk_column[chunk] + static_cast<int64_t>(task.n - p.chunk_tile[chunk]) * p.second_tile_n;
    end = std::min<int64_t>(begin + p.second_tile_n, p.chunk_column[chunk + 1]);
  }
  if (end <= begin) return {};
  const int64_t row = column_in(random, range.begin, range.end), column = column_in(random, begin, end);
  const RowSource source = p.rows[row];
  if (sent) return {slot_of(call, source.rank, source.token, source.slot, column)};
  return {call.ranks[p.rank].output_rows + row * call.shape.hidden + column};
}

Spot summed(Call& call, const RankProgram& p, const Task& task, BitSite site, Choice& random) {
  const int64_t begin = static_cast<int64_t>(task.m) * kTokenBlock,
                end = std::min<int64_t>(begin + kTokenBlock, p.tokens);
  if (end <= begin || p.chunk_column[task.n + 1] <= p.chunk_column[task.n]) return {};
  const int64_t token = summed_token(p, static_cast<int32_t>(column_in(random, begin, end)));
  const int64_t column = column_in(random, p.chunk_column[task.n], p.chunk_column[task.n + 1]);
  BFloat16* const out = call.ranks[p.rank].output + token * call.shape.hidden + column;
  if (site != BitSite::kSum) return {out};
  float sum = 0.0f;
  for (int64_t slot = 0; slot < call.slot_count && p.combine_groups == 0; ++slot) {
    if (p.expert_of_slot[token * p.topk + slot] < 0) continue;
    sum = add(sum, to_float(*slot_of(call, p.rank, static_cast<int32_t>(token), slot, column)));
  }
  const uint32_t bit = 16 + static_cast<uint32_t>(random.below(14));  // not rounded away, and no NaN
  *out = to_bfloat16(float_from_bits(bits_of_float(sum) ^ (1u << bit)));
  return {};
}

Spot gradient(Call& call, const RankProgram& p, const Task& task, Choice& random) {
  const bool fc2 = task.stage == Stage::kWgradFc2;
  const WgradGrid& grid = fc2 ? p.wgrad_fc2 : p.wgrad_fc1;
  RankBuffers& own = call.ranks[p.rank];
  const int64_t row = static_cast<int64_t>(task.m) * grid.tile_m, column = static_cast<int64_t>(task.n) * grid.tile_n;
  const int64_t line = column_in(random, row, std::min<int64_t>(row + grid.tile_m, grid.rows));
  const int64_t at = column_in(random, column, std::min<int64_t>(column + grid.tile_n, grid.columns));
  const bool up = !fc2 && line >= call.shape.intermediate;
  void* const out = fc2 ? own.dw2[task.expert] : up ? own.dw1_up[task.expert] : own.dw1[task.expert];
  const int64_t index = (line - (up ? call.shape.intermediate : 0)) * grid.columns + at;
  if (call.numerics.weight_gradient == WeightGradient::kBFloat16) return {static_cast<BFloat16*>(out) + index};
  return {static_cast<float*>(out) + index, true};
}

bool has_site(Stage stage, BitSite site, const RankProgram& p) {
  switch (stage) {
    case Stage::kPull:
    case Stage::kReceive:
      return site == BitSite::kDispatchedRow;
    case Stage::kFirstGemm:
      return site == BitSite::kFirstGemm || site == BitSite::kWorker;
    case Stage::kSecondGemm:
      return site == BitSite::kWorker || (site == BitSite::kReturnedRow && p.epilogue_combine);
    case Stage::kSend:
      return site == BitSite::kReturnedRow;
    case Stage::kReduce:
      return site == BitSite::kOutput || site == BitSite::kSum || site == BitSite::kWorker;
    case Stage::kWgradFc1:
    case Stage::kWgradFc2:
      return site == BitSite::kGradient || site == BitSite::kWorker;
    default:
      return false;
  }
}

}  // namespace

void flip_bit(Call& call, BitFault& fault, const RankProgram& p, int worker, const Task& task) {
  if ((p.rank != fault.rank && fault.rank >= 0) || !has_site(task.stage, fault.site, p)) return;
  if (fault.raster != 0 && call.schedule.order.raster != fault.raster) return;
  if (fault.site == BitSite::kWorker && worker != fault.worker) return;
  const int64_t tile = fault.tiles.fetch_add(1, std::memory_order_relaxed);
  Choice random(fault.seed * 1000003 + static_cast<uint64_t>(tile), fault.steady);
  if (fault.steady) {
    if (task.m != 0 || task.n != 0) return;
  } else if (fault.one_in == 0 ? tile != fault.after : random.below(fault.one_in) != 0) {
    return;
  }
  if (fault.one_in != 0 && fault.flipped.load(std::memory_order_relaxed) >= fault.most) return;
  Spot spot;
  switch (task.stage) {
    case Stage::kPull:
    case Stage::kReceive:
      spot = dispatched(call, p, task, random);
      break;
    case Stage::kFirstGemm:
      spot = first_gemm(call, p, task, random);
      break;
    case Stage::kSecondGemm:
    case Stage::kSend:
      spot = returned(call, p, task, random);
      break;
    case Stage::kReduce:
      spot = summed(call, p, task, fault.site, random);
      break;
    default:
      spot = gradient(call, p, task, random);
  }
  fault.flipped.fetch_add(1, std::memory_order_relaxed);
  if (spot.bytes == nullptr) return;
  if (spot.is_float) {
    float* const value = static_cast<float*>(spot.bytes);
    *value = float_from_bits(bits_of_float(*value) ^ (1u << random.below(30)));
  } else {
    static_cast<BFloat16*>(spot.bytes)->bits ^=
        static_cast<uint16_t>(1u << (fault.steady ? kSteadyBit : random.below(14)));
  }
}

}  // namespace uniep::cpu
