#include "model/placement.h"

#include <array>

#include "model/token_order.h"

namespace uniep {

std::vector<int32_t> order_by_last_expert(const std::vector<int32_t>& expert_of_slot, int64_t tokens,
                                          const LayerShape& shape, int ranks) {
  const auto class_of = [&](int64_t token) {
    return token_class(expert_of_slot.data() + token * shape.topk, static_cast<int32_t>(shape.topk),
                       static_cast<int32_t>(shape.experts), static_cast<int32_t>(shape.experts / ranks));
  };
  std::array<int32_t, kTokenClasses + 1> next{};
  for (int64_t token = 0; token < tokens; ++token) ++next[class_of(token) + 1];
  for (int32_t i = 0; i < kTokenClasses; ++i) next[i + 1] += next[i];
  std::vector<int32_t> order(tokens);
  for (int64_t token = 0; token < tokens; ++token) order[next[class_of(token)]++] = static_cast<int32_t>(token);
  return order;
}

void lay_out_rows(internal::PlacementState& state) {
  const int64_t experts = state.shape.experts;
  const int ranks = state.ranks;
  state.source_offset.assign(ranks * experts, 0);
  state.expert_rows.assign(experts, 0);
  state.segment_start.assign(experts, 0);
  state.rank_of_expert.assign(experts, 0);
  state.rows.assign(ranks, 0);
  state.padded_rows.assign(ranks, 0);
  for (int source = 0; source < ranks; ++source) {
    for (int64_t expert = 0; expert < experts; ++expert) {
      state.source_offset[source * experts + expert] = state.expert_rows[expert];
      state.expert_rows[expert] += state.counts[source * experts + expert];
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t start = 0;
    for (int32_t expert = state.expert_begin[rank]; expert < state.expert_begin[rank + 1]; ++expert) {
      state.rank_of_expert[expert] = rank;
      state.segment_start[expert] = static_cast<int32_t>(start);
      state.rows[rank] += state.expert_rows[expert];
      start += round_up(state.expert_rows[expert], kRowAlignment);
    }
    state.padded_rows[rank] = start;
  }
}

std::vector<int32_t> first_rows(const internal::PlacementState& state, int source_rank) {
  const int64_t experts = state.shape.experts;
  std::vector<int32_t> next_row(experts);
  for (int64_t expert = 0; expert < experts; ++expert) {
    next_row[expert] = state.segment_start[expert] + state.source_offset[source_rank * experts + expert];
  }
  return next_row;
}

void write_row_tables(internal::PlacementState& state, int source_rank, const float* probs) {
  const internal::RankPlacement& source = state.rank[source_rank];
  const int64_t topk = state.shape.topk;
  for (int64_t token = 0; token < source.tokens; ++token) {
    for (int64_t slot = 0; slot < topk; ++slot) {
      const int64_t entry = token * topk + slot;
      const int32_t expert = source.expert_of_slot[entry];
      if (expert < 0) continue;
      internal::RankPlacement& owner = state.rank[state.rank_of_expert[expert]];
      const int32_t row = source.row_of_slot[entry];
      owner.rows[row] = {source_rank, static_cast<int32_t>(token), static_cast<int32_t>(slot), probs[entry]};
    }
  }
}

}  // namespace uniep
