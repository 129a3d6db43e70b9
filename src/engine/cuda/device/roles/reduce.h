#pragma once

#include "engine/cuda/device/roles/row_sum.h"
#include "engine/cuda/device/waiting.h"

// The end of the combine: each token's slots are summed in order. The tiles of kReduce are cut into items of a few
// tokens, which all warps that come take one by one.
namespace uniep::cuda {

constexpr int32_t kTokensPerItem = 4;
static_assert(kTokenBlock % kTokensPerItem == 0, "an item lies inside one tile");

// Deals the items. `next` is the CTA's counter in shared memory, 0 at the begin of the launch; across CTAs items go
// round, or by tickets under a dynamic queue.
UNIEP_DEVICE int64_t take_reduce_item(const RunningCall& running, const Participants& who, uint32_t* next) {
  const RankProgram& p = running.call.program;
  uint32_t turn = 0;
  if (ptx::lane_index() == 0) {
    uint32_t* const tickets = counter_of(running, CounterSpace::kTickets,
                                         running.launch * kListKinds + static_cast<int32_t>(ListKind::kReduce));
    turn = atomicAdd(p.dynamic ? tickets : next, 1u);
  }
  turn = __shfl_sync(0xffffffffu, turn, 0);
  return p.dynamic ? turn : static_position(p, who, running.worker, turn);
}

// Every slot of the tokens [begin, end) has come; in backward its dprob is passed on as soon as it has.
UNIEP_DEVICE bool wait_for_slots(const RunningCall& running, const uniep::Task& task, int32_t begin, int32_t end) {
  const RankCall& call = running.call;
  const RankProgram& p = call.program;
  const bool with_probs = p.direction == Direction::kBackward && task.n == 0;
  const int64_t last = static_cast<int64_t>(end) * p.topk;
  bool holds = true;
  for (int64_t entry = static_cast<int64_t>(begin) * p.topk + ptx::lane_index(); holds && entry < last;
       entry += ptx::kThreadsPerWarp) {
    const int32_t expert = p.expert_of_slot[entry];
    if (expert >= 0) {
      const int32_t unit = p.combine_groups > 0 ? task.m : block_of_row(p, expert, p.row_of_slot[entry]);
      holds = wait_for(running, task,
                       FlagWait{FlagSpace::kCombined, combined_flag(p, p.rank_of_expert[expert], unit, task.n)});
    }
    if (with_probs && holds) call.dprobs[entry] = expert < 0 ? 0.0f : call.prob_slots[p.rank][entry];
  }
  return __all_sync(0xffffffffu, holds);
}

// The mask of a token's summands [32 word, 32 word + 32): slots that are used, or groups that have a slot.
UNIEP_DEVICE uint32_t used_summands(const RankProgram& p, int32_t token, int32_t word) {
  const int32_t* const experts = p.expert_of_slot + static_cast<int64_t>(token) * p.topk;
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  if (p.combine_groups == 0) {
    const int32_t slot = word * 32 + lane;
    return __ballot_sync(0xffffffffu, slot < p.topk && experts[slot] >= 0);
  }
  const int32_t experts_per_group = p.experts / p.combine_groups;
  uint32_t mask = 0;
  for (int32_t slot = lane; slot < p.topk; slot += ptx::kThreadsPerWarp) {
    const int32_t group = experts[slot] < 0 ? -1 : experts[slot] / experts_per_group;
    if (group >= 0 && group / 32 == word) mask |= 1u << (group % 32);
  }
  return __reduce_or_sync(0xffffffffu, mask);
}

template <SumDepth kDepth>
UNIEP_DEVICE void reduce_token(const RankCall& call, int32_t token, int32_t chunk) {
  const RankProgram& p = call.program;
  const int32_t column = p.chunk_column[chunk], columns = p.chunk_column[chunk + 1] - column;
  const BFloat16* const slots =
      call.slots[p.rank] + static_cast<int64_t>(token) * call.slot_count * call.hidden + column;
  sum_rows<kDepth>(
      call.slot_count, columns, [&](int32_t word) { return used_summands(p, token, word); },
      [&](int32_t summand) { return slots + summand * call.hidden; }, call.output + token * call.hidden + column);
}

// A whole warp. False once the call has failed.
template <SumDepth kDepth>
UNIEP_DEVICE bool run_reduce(const RunningCall& running, uint32_t* next) {
  const RankProgram& p = running.call.program;
  const Participants who = participants_of(p, running.launch, ListKind::kReduce);
  if (!p.stages[running.launch].combine || running.worker < who.begin || running.worker >= who.end) return true;
  const int64_t items = (p.tokens + kTokensPerItem - 1) / kTokensPerItem;
  for (;;) {
    const int64_t item = take_reduce_item(running, who, next);
    if (item >= items * p.chunks) return true;
    const int32_t chunk = static_cast<int32_t>(item / items);
    const int32_t begin = static_cast<int32_t>(item % items) * kTokensPerItem;
    const int32_t end = begin + kTokensPerItem < p.tokens ? begin + kTokensPerItem : p.tokens;
    const uniep::Task task{Stage::kReduce, -1, begin / kTokenBlock, chunk};
    if (!wait_for_slots(running, task, begin, end)) return false;
    for (int32_t token = begin; token < end; ++token) reduce_token<kDepth>(running.call, token, chunk);
  }
}

}  // namespace uniep::cuda
