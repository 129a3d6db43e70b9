#pragma once

#include "engine/cuda/device/signals/tickets.h"
#include "engine/cuda/device/signals/tile_recorder.h"
#include "engine/cuda/device/transfer/row_sum.h"

// The end of the combine: each token's slots are summed in order. The tiles of kReduce are cut into items of a few
// tokens, which all warps that come take one by one, in the order in which tokens become complete, or with groups
// ascending (summed_token()).
namespace uniep::cuda {

constexpr int32_t kTokensPerItem = 2;
static_assert(kTokenBlock % kTokensPerItem == 0, "an item lies inside one tile");

// Deals the items. `next` is the CTA's counter in shared memory, 0 at the begin of the launch; across CTAs items go
// round, or by tickets under a dynamic queue.
UNIEP_DEVICE uint32_t take_reduce_item(const RunningCall& running, const Participants& who, uint32_t* next) {
  uint32_t item = 0;
  if (ptx::lane_index() == 0) {
    if (running.call.program.dynamic) {
      item = take_ticket(running, ticket_counter(running.launch, ListKind::kReduce));
    } else {
      item = static_cast<uint32_t>(even_position(who, running.worker, atomicAdd(next, 1u)));
    }
  }
  return ptx::warp_uniform(item);
}

// The tokens of an item, a lane each.
struct ReduceItem {
  int32_t count;
  int32_t token;  // of this lane, below `count`

  UNIEP_DEVICE int32_t token_at(int32_t lane) const { return __shfl_sync(0xffffffffu, token, lane); }
};

UNIEP_DEVICE ReduceItem reduce_item(const RankProgram& p, int32_t begin) {
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  const int32_t count = p.tokens - begin < kTokensPerItem ? p.tokens - begin : kTokensPerItem;
  return {count, lane < count ? summed_token(p, begin + lane) : 0};
}

// Every slot of the item's tokens has come; in backward its dprob is passed on as soon as it has.
UNIEP_DEVICE bool wait_for_slots(const RunningCall& running, const uniep::Task& task, const ReduceItem& item) {
  const RankCall& call = running.call;
  const RankProgram& p = call.program;
  const bool with_probs = p.direction == Direction::kBackward && task.n == 0;
  const int32_t slots = item.count * p.topk;
  bool holds = true;
  for (int32_t first = 0; first < slots; first += ptx::kThreadsPerWarp) {
    const int32_t slot = first + static_cast<int32_t>(ptx::lane_index());
    const int32_t entry = item.token_at(slot / p.topk) * p.topk + slot % p.topk;  // a rank has fewer than 2^31 slots
    if (!holds || slot >= slots) continue;
    const int32_t expert = p.expert_of_slot[entry];
    if (expert >= 0) {
      const int32_t unit = p.combine_groups > 0 ? task.m : block_of_row(p, expert, p.row_of_slot[entry]);
      holds = wait_for(running, task,
                       FlagWait{FlagSpace::kCombined, combined_flag(p, p.rank_of_expert[expert], unit, task.n)});
    }
    if (with_probs && holds) call.dprobs[entry] = expert < 0 ? 0.0f : call.prob_slots[p.rank][entry];
  }
  return all_lanes(holds);
}

// The expert of a lane's slot of a token, or -1.
UNIEP_DEVICE int32_t expert_of_lane(const RankProgram& p, int32_t token) {
  const int32_t slot = static_cast<int32_t>(ptx::lane_index());
  return slot < p.topk ? p.expert_of_slot[static_cast<int64_t>(token) * p.topk + slot] : -1;
}

// The mask of a token's summands: slots that are used, or groups that have a slot.
UNIEP_DEVICE uint32_t summands_of(const RankProgram& p, int32_t expert) {
  if (p.combine_groups == 0) return __ballot_sync(0xffffffffu, expert >= 0);
  const int32_t experts_per_group = p.experts / p.combine_groups;
  return __reduce_or_sync(0xffffffffu, expert < 0 ? 0u : 1u << (expert / experts_per_group));
}

template <typename Sum>
UNIEP_DEVICE void reduce_tokens(const RankCall& call, const ReduceItem& item, int32_t chunk, Sum& sum) {
  const RankProgram& p = call.program;
  const int32_t column = p.chunk_column[chunk];
  const int32_t columns = p.chunk_column[chunk + 1] - column;
  int32_t expert = expert_of_lane(p, item.token_at(0));
  for (int32_t i = 0; i < item.count; ++i) {
    const int32_t token = item.token_at(i);
    const int32_t next_expert = i + 1 < item.count ? expert_of_lane(p, item.token_at(i + 1)) : -1;  // read meanwhile
    const int64_t row = static_cast<int64_t>(token) * call.slot_count + ptx::lane_index();
    sum(summands_of(p, expert), call.slot_rows[p.rank] + row * call.hidden + column, columns,
        call.output + token * call.hidden + column);
    expert = next_expert;
  }
}

// A whole warp, which sums as `sum` does (row_sum.h). False once the call has failed.
template <typename Sum>
UNIEP_DEVICE bool run_reduce(const RunningCall& running, uint32_t* next, Sum& sum, const TileRecorder& recorder) {
  const RankProgram& p = running.call.program;
  const Participants who = participants_of(p, running.launch, ListKind::kReduce);
  if (!p.stages[running.launch].combine || running.worker < who.begin || running.worker >= who.end) return true;
  const uint32_t items = static_cast<uint32_t>(p.tokens + kTokensPerItem - 1) / kTokensPerItem;
  bool holds = true;
  while (holds) {
    const uint32_t item = take_reduce_item(running, who, next);
    if (item >= items * p.chunks) break;
    const int32_t begin = static_cast<int32_t>(item % items) * kTokensPerItem;
    const uniep::Task task{Stage::kReduce, -1, begin / kTokenBlock, static_cast<int32_t>(item / items)};
    recorder.wait_begins();
    const ReduceItem tokens = reduce_item(p, begin);
    holds = wait_for_slots(running, task, tokens);
    if (!holds) break;
    recorder.begins();
    disturb(running, DisturbedAt::kCopy);
    ptx::fence_proxy_async_global();  // a sum may read by bulk copies
    reduce_tokens(running.call, tokens, task.n, sum);
    recorder.ends(task);
  }
  sum.finish();
  return holds;
}

}  // namespace uniep::cuda
