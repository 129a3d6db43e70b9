#include <algorithm>

#include "engine/cpu/tile_work.h"
#include "engine/workspace.h"
#include "model/elementwise.h"

// Combine: rows travel back to their token's rank and are summed there, slots ascending.
namespace uniep::cpu {
namespace {

void return_prob_gradient(Call& call, const RankProgram& p, const RowSource& source, int64_t row) {
  const RankBuffers& own = call.ranks[p.rank];
  const int64_t chunks = internal::prob_terms(call.shape, call.numerics);
  float sum = 0.0f;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum = add(sum, own.prob_chunks[chunk * own.prob_stride + row]);
  call.ranks[source.rank].prob_slots[static_cast<int64_t>(source.token) * p.topk + source.slot] = canonical_nan(sum);
}

void send(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  const RankBuffers& own = call.ranks[p.rank];
  const int64_t column = p.chunk_column[task.n], width = p.chunk_column[task.n + 1] - column;
  const RowRange range = rows_of_block(p, p.first_expert + task.expert, task.m);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const RowSource source = p.rows[row];
    scratch.destinations.assign(1, slot_of(call, source.rank, source.token, source.slot, column));
    scratch.ring.copy(own.output_rows + row * call.shape.hidden + column, scratch.destinations, width);
  }
  scratch.ring.drain();
}

// The slots of one token that lie in one group of experts of this rank, summed and rounded, are one row on the way
// back.
void group_send(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  const RankBuffers& own = call.ranks[p.rank];
  const int64_t column = p.chunk_column[task.n], width = p.chunk_column[task.n + 1] - column;
  const int32_t experts_per_group = p.experts / p.combine_groups;
  const int32_t first_group = p.first_expert / experts_per_group;
  const int32_t end_group = first_group + p.local_experts / experts_per_group;
  const int32_t begin = task.m * kTokenBlock;
  const int32_t end = std::min(begin + kTokenBlock, p.tokens_of_rank[task.expert]);
  for (int32_t token = begin; token < end; ++token) {
    for (int32_t group = first_group; group < end_group; ++group) {
      const int32_t first_expert = group * experts_per_group;
      const int32_t last_expert = first_expert + experts_per_group - 1;
      const int32_t first_row = p.segment_start[first_expert];
      const int32_t end_row = p.segment_start[last_expert] + p.expert_rows[last_expert];
      scratch.sources.clear();
      for (int32_t slot = 0; slot < p.topk; ++slot) {
        const int32_t row = row_here(p, task.expert, first_entry(p, task.expert, token) + slot);
        if (row < first_row || row >= end_row) continue;
        scratch.sources.push_back(own.output_rows + static_cast<int64_t>(row) * call.shape.hidden + column);
      }
      if (scratch.sources.empty()) continue;
      call.kernels.sum_rows(scratch.sources.data(), static_cast<int64_t>(scratch.sources.size()),
                            slot_of(call, task.expert, token, group, column), width);
    }
  }
}

// Lists the rows of `slots` that a token's sum takes, in the order of the sum.
void list_summands(Call& call, const RankProgram& p, int32_t token, int64_t column, AgentScratch& scratch) {
  scratch.sources.clear();
  const int32_t* experts = p.expert_of_slot + static_cast<int64_t>(token) * p.topk;
  if (p.combine_groups == 0) {
    for (int32_t slot = 0; slot < p.topk; ++slot) {
      if (experts[slot] >= 0) scratch.sources.push_back(slot_of(call, p.rank, token, slot, column));
    }
  } else {
    const int32_t experts_per_group = p.experts / p.combine_groups;
    for (int32_t group = 0; group < p.combine_groups; ++group) {
      const bool used = std::any_of(experts, experts + p.topk,
                                    [&](int32_t expert) { return expert >= 0 && expert / experts_per_group == group; });
      if (used) scratch.sources.push_back(slot_of(call, p.rank, token, group, column));
    }
  }
  if (call.fault == Fault::kReorderedSum) std::reverse(scratch.sources.begin(), scratch.sources.end());
}

// dprobs of one token.
void store_dprobs(const RankBuffers& own, const RankProgram& p, int32_t token) {
  const int32_t* const experts = p.expert_of_slot + static_cast<int64_t>(token) * p.topk;
  const float* const slots = own.prob_slots + static_cast<int64_t>(token) * p.topk;
  const int64_t width = own.dense_dprobs ? p.experts : p.topk;
  float* const dprobs = own.dprobs + token * width;
  std::fill_n(dprobs, width, 0.0f);
  for (int32_t slot = 0; slot < p.topk; ++slot) {
    if (experts[slot] >= 0) dprobs[own.dense_dprobs ? experts[slot] : slot] = slots[slot];
  }
}

void reduce(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  RankBuffers& own = call.ranks[p.rank];
  const int64_t column = p.chunk_column[task.n], width = p.chunk_column[task.n + 1] - column;
  const int32_t begin = task.m * kTokenBlock;
  const int32_t end = std::min(begin + kTokenBlock, p.tokens);
  const bool with_probs = p.direction == Direction::kBackward && task.n == 0;
  for (int32_t position = begin; position < end; ++position) {
    const int32_t token = summed_token(p, position);
    list_summands(call, p, token, column, scratch);
    call.kernels.sum_rows(scratch.sources.data(), static_cast<int64_t>(scratch.sources.size()),
                          own.output + token * call.shape.hidden + column, width);
    if (with_probs) store_dprobs(own, p, token);
  }
}

}  // namespace

void return_prob_gradients(Call& call, const RankProgram& p, const Task& task) {
  if (task.stage == Stage::kGroupSend) {
    for_each_row_of_tokens(p, task.expert, task.m, [&](int32_t token, int32_t slot, int32_t row) {
      return_prob_gradient(call, p, {task.expert, token, slot, 0.0f}, row);
    });
    return;
  }
  const RowRange range = rows_of_block(p, p.first_expert + task.expert, task.m);
  for (int32_t row = range.begin; row < range.end; ++row) {
    const RowSource source = p.rows[row];
    return_prob_gradient(call, p, source, row);
  }
}

void run_combine_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  switch (task.stage) {
    case Stage::kSend:
      return send(call, p, task, scratch);
    case Stage::kGroupSend:
      return group_send(call, p, task, scratch);
    default:
      return reduce(call, p, task, scratch);
  }
}

}  // namespace uniep::cpu
