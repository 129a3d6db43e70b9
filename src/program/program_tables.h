#pragma once

#include "program/hopper_rates.h"
#include "program/order.h"

// The entries of a Program's tables, one by one: the host adds them up in loops, the device by prefix sums.
namespace uniep::program {

// The block of a local expert that comes first in order: the one where this rank's own rows begin.
UNIEP_HOST_DEVICE int32_t first_block_in_order(const RankProgram& p, int32_t local_expert) {
  const int32_t expert = p.first_expert + local_expert;
  const int32_t blocks = blocks_of_rows(p.expert_rows[expert], p.tile_m);
  if (!p.source_rotation || blocks == 0) return 0;
  const int32_t own_first = p.source_offset[p.rank * p.experts + expert] / p.tile_m;
  return own_first < blocks - 1 ? own_first : blocks - 1;
}

// When an expert comes among those of its rank under order.experts=heavy_first.
UNIEP_HOST_DEVICE int32_t heavy_turn(const RankProgram& p, int32_t expert) {
  const int32_t first = expert / p.local_experts * p.local_experts, rows = p.expert_rows[expert];
  int32_t turn = 0;
  for (int32_t other = first; other < first + p.local_experts; ++other) {
    turn += p.expert_rows[other] > rows || (p.expert_rows[other] == rows && other < expert) ? 1 : 0;
  }
  return turn;
}

// Spans of an expert with so many row blocks.
UNIEP_HOST_DEVICE int32_t spans_of_blocks(const RankProgram& p, int32_t blocks) {
  return p.wave_blocks > 0 ? (blocks + p.wave_blocks - 1) / p.wave_blocks : 1;
}

// The blocks that hold rows of this rank, of a destination's expert.
struct PushRun {
  int32_t first, blocks;
};
UNIEP_HOST_DEVICE PushRun push_run(const RankProgram& p, int32_t destination, int32_t local_expert) {
  const int32_t expert = destination * p.local_experts + local_expert;
  const int32_t offset = p.source_offset[p.rank * p.experts + expert];
  const int32_t count = p.counts[p.rank * p.experts + expert];
  const int32_t first = offset / p.tile_m;
  return {first, count == 0 ? 0 : (offset + count - 1) / p.tile_m - first + 1};
}

// The index-th in order: the destinations take turns, each with its expert of one turn.
UNIEP_HOST_DEVICE PushRun push_run_in_order(const RankProgram& p, int32_t index) {
  const int32_t destination = destination_of_turn(p, index % p.ranks);
  return push_run(p, destination, expert_of_turn(p, destination, index / p.ranks));
}

// Workers that dispatch first join the GEMM tiles when about as much time has passed as their copying takes.
// `rows`: routed rows of this rank. Needs p's other tables.
UNIEP_HOST_DEVICE int64_t late_position_of(const RankProgram& p, int64_t rows, int64_t hidden, int64_t intermediate) {
  const int64_t list = p.stages[0].dispatch ? list_length(p, 0, ListKind::kCompute) : 0;
  const int32_t shared = p.workers - p.combine_workers - p.reduce_workers;
  const int32_t first_copying = first_copying_workers(p);
  if (!p.on_sms || list == 0 || shared <= first_copying) return 0;
  const double copy = static_cast<double>(rows) * hidden * 2 * p.operands / first_copying * kOperationsPerCopiedByte;
  const double list_operations = 6.0 * rows * hidden * intermediate;
  const double per_worker = list_operations / (shared - first_copying);
  if (per_worker <= 0) return 0;
  const double share = copy / per_worker;
  const int64_t position = static_cast<int64_t>(list * (share < 1.0 ? share : 1.0));
  return position / p.cluster * p.cluster;
}

}  // namespace uniep::program
