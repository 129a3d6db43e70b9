#pragma once

#include "engine/cuda/device/signals/waiting.h"
#include "engine/cuda/device/transfer/copy_ring.h"
#include "engine/cuda/device/transfer/row_sum.h"

// The staged combine: rows of o (or dxg) from the expert's rank into the slots of their token's rank. One task by one
// warp each, whose waits hold; it ends with the task's flags.
namespace uniep::cuda {

// dprob of a row goes where its token's dprobs lie: the sum of its 64-column chunks, ascending.
UNIEP_DEVICE void return_prob_gradient(const RankCall& call, int32_t rank, int32_t token, int32_t slot, int64_t row) {
  constexpr int32_t kLoads = 8;  // under way together
  const float* const sums = call.prob_chunks + row;
  float sum = 0.0f;
  for (int32_t first = 0; first < call.prob_chunk_count; first += kLoads) {
    float values[kLoads];
#pragma unroll
    for (int32_t i = 0; i < kLoads; ++i) {
      values[i] = first + i < call.prob_chunk_count ? sums[static_cast<int64_t>(first + i) * call.prob_stride] : 0.0f;
    }
#pragma unroll
    for (int32_t i = 0; i < kLoads; ++i) {
      if (first + i < call.prob_chunk_count) sum = add(sum, values[i]);
    }
  }
  call.prob_slots[rank][static_cast<int64_t>(token) * call.program.topk + slot] = sum;
}

UNIEP_DEVICE BFloat16* slot_of(const RankCall& call, int32_t rank, int32_t token, int32_t slot, int32_t column) {
  return call.slot_rows[rank] + (static_cast<int64_t>(token) * call.slot_count + slot) * call.hidden + column;
}

template <typename Ring>
UNIEP_DEVICE void send_rows(const RunningCall& running, const uniep::Task& task, Ring& ring) {
  const RankCall& call = running.call;
  const RankProgram& p = call.program;
  const int32_t column = p.chunk_column[task.n];
  const uint32_t bytes = static_cast<uint32_t>((p.chunk_column[task.n + 1] - column) * sizeof(BFloat16));
  const RowRange range = rows_of_block(p, p.first_expert + task.expert, task.m);
  copy_rows(ring, {range.begin, range.end, bytes},
            RowChoice{[](int32_t) { return true; },
                      [&](int32_t row) { return call.output_rows + row * call.hidden + column; }},
            [&](const auto& chunk, uint32_t bytes_of_chunk) {
              if (ptx::lane_index() != 0) return;
              const RowSource source = p.rows[chunk.row];
              auto* const slot =
                  reinterpret_cast<uint8_t*>(slot_of(call, source.rank, source.token, source.slot, column));
              ptx::bulk_store(slot + chunk.offset, chunk.address, bytes_of_chunk);
            });
  if (p.direction == Direction::kBackward && task.n == 0) {
    for (int32_t row = range.begin + static_cast<int32_t>(ptx::lane_index()); row < range.end;
         row += ptx::kThreadsPerWarp) {
      const RowSource source = p.rows[row];
      return_prob_gradient(call, source.rank, source.token, source.slot, row);
    }
  }
  ring.complete();
  signal_task(running, task);
}

// What for_each_wait lists for a group send, by all lanes together.
UNIEP_DEVICE bool wait_for_group_send(const RunningCall& running, const uniep::Task& task) {
  const RankProgram& p = running.call.program;
  const int32_t begin = task.m * kTokenBlock;
  const int32_t limit = p.tokens_of_rank[task.expert];
  const int32_t end = begin + kTokenBlock < limit ? begin + kTokenBlock : limit;
  const int32_t* const rows = p.row_of_source + p.source_begin[task.expert];
  const uint32_t tiles = static_cast<uint32_t>(tiles_in_chunk(p, task.n));
  bool holds = true;
  for (int32_t entry = begin * p.topk + static_cast<int32_t>(ptx::lane_index());
       holds && tiles > 0 && entry < end * p.topk; entry += ptx::kThreadsPerWarp) {
    const int32_t row = rows[entry];
    if (row < 0) continue;
    const int64_t counter = second_counter(block_holding(p, row), task.n);
    holds = wait_for(running, task, CounterWait{CounterSpace::kSecondTiles, counter, tiles});
  }
  if (holds) holds = wait_for(running, task, FlagWait{FlagSpace::kArrive, task.expert});
  return all_lanes(holds);
}

// The warps that send a block of tokens together, each its own tokens. Where there are several, a named barrier brings
// them together.
struct SendTeam {
  uint32_t warp = 0;
  uint32_t warps = 1;
  uint32_t barrier = 0;

  // Whether all threads say so; what any of them has stored before lies before what any of them does after.
  UNIEP_DEVICE bool agrees(bool here) const {
    if (warps == 1) return all_lanes(here);
    return ptx::named_barrier_all(barrier, warps * ptx::kThreadsPerWarp, here);
  }
};

// The group of experts that a row of this rank belongs to.
UNIEP_DEVICE int32_t group_of_row(const RankProgram& p, int32_t row) {
  const int32_t experts_per_group = p.experts / p.combine_groups;
  const bool same_for_all = experts_per_group % p.local_experts == 0;
  return (p.first_expert + (same_for_all ? 0 : local_expert_holding(p, row))) / experts_per_group;
}

// The slots of one token that lie in one group of experts of this rank, summed and rounded, are one row on the way
// back. Lane k knows the row of slot k, or -1.
template <typename Sum>
UNIEP_DEVICE void send_token(const RankCall& call, const uniep::Task& task, int32_t token, int32_t row, Sum& sum) {
  const RankProgram& p = call.program;
  const int32_t group = row < 0 ? -1 : group_of_row(p, row);
  for (uint32_t left = __ballot_sync(0xffffffffu, row >= 0); left != 0;) {
    // Groups come in the order of their first slots; their sums do not depend on each other.
    const int32_t next = __shfl_sync(0xffffffffu, group, __ffs(static_cast<int>(left)) - 1);
    const uint32_t summands = __ballot_sync(0xffffffffu, group == next);
    const int32_t column = p.chunk_column[task.n];
    sum(summands, call.output_rows + row * call.hidden + column, p.chunk_column[task.n + 1] - column,
        slot_of(call, task.expert, token, next, column));
    left &= ~summands;
  }
  if (p.direction == Direction::kBackward && task.n == 0 && row >= 0) {
    return_prob_gradient(call, task.expert, token, static_cast<int32_t>(ptx::lane_index()), row);
  }
}

template <typename Sum>
UNIEP_DEVICE void send_groups(const RunningCall& running, const uniep::Task& task, const SendTeam& team, Sum& sum) {
  const RankProgram& p = running.call.program;
  const int32_t begin = task.m * kTokenBlock;
  const int32_t limit = p.tokens_of_rank[task.expert];
  const int32_t end = begin + kTokenBlock < limit ? begin + kTokenBlock : limit;
  const int32_t slot = static_cast<int32_t>(ptx::lane_index());
  const int32_t* const rows = p.row_of_source + p.source_begin[task.expert];
  const auto row_of = [&](int32_t token) {
    return token < end && slot < p.topk ? rows[static_cast<int64_t>(token) * p.topk + slot] : -1;
  };
  const int32_t warps = static_cast<int32_t>(team.warps);
  int32_t token = begin + static_cast<int32_t>(team.warp);
  for (int32_t row = row_of(token); token < end; token += warps) {
    const int32_t next_row = row_of(token + warps);  // is read while this token's are summed
    send_token(running.call, task, token, row, sum);
    row = next_row;
  }
  sum.finish();
  team.agrees(true);
  if (team.warp == 0) signal_task(running, as_stage<Stage::kGroupSend>(task));
}

}  // namespace uniep::cuda
