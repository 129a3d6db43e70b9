#include "tune/small_placement.h"

#include "model/placement.h"

namespace uniep::tune {

std::shared_ptr<const internal::PlacementState> small_placement(const LayerShape& shape, int ranks, int64_t tokens) {
  auto state = std::make_shared<internal::PlacementState>();
  state->shape = shape;
  state->ranks = ranks;
  state->local = {0, ranks};
  state->rank.resize(static_cast<std::size_t>(ranks));
  state->counts.assign(static_cast<std::size_t>(ranks * shape.experts), 0);
  for (int rank = 0; rank <= ranks; ++rank) {
    state->expert_begin.push_back(static_cast<int32_t>(rank * shape.experts / ranks));
  }
  const std::vector<float> probs(static_cast<std::size_t>(tokens * shape.topk), 1.0f);
  for (int rank = 0; rank < ranks; ++rank) {
    internal::RankPlacement& own = state->rank[static_cast<std::size_t>(rank)];
    own.tokens = tokens;
    std::vector<int32_t> ids;
    for (int64_t entry = 0; entry < tokens * shape.topk; ++entry) {
      ids.push_back(static_cast<int32_t>((rank * tokens * shape.topk + entry) % shape.experts));
    }
    own.expert_of_slot.resize(ids.size());
    count_chunk(ids.data(), probs.data(), {0, tokens}, shape,
                {state->counts.data() + rank * shape.experts, own.expert_of_slot.data()});
  }
  lay_out_rows(*state);
  for (int rank = 0; rank < ranks; ++rank) {
    internal::RankPlacement& own = state->rank[static_cast<std::size_t>(rank)];
    own.rows.assign(static_cast<std::size_t>(state->padded_rows[static_cast<std::size_t>(rank)]),
                    RowSource{-1, -1, -1, 0.0f});
    own.row_of_slot.resize(own.expert_of_slot.size());
    std::vector<int32_t> next_row = first_rows(*state, rank);
    assign_chunk(own.expert_of_slot.data(), {0, tokens}, shape.topk, next_row.data(), own.row_of_slot.data());
    own.token_order = order_by_last_expert(own.expert_of_slot, tokens, shape, ranks);
  }
  for (int source = 0; source < ranks; ++source) write_row_tables(*state, source, probs.data());
  return state;
}

}  // namespace uniep::tune
