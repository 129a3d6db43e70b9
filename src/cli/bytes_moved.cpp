#include "cli/bytes_moved.h"

#include "model/placement_state.h"

namespace uniep::cli {
namespace {

// Rows from a token's rank to the ranks of its experts, where slots that share a key travel as one row.
template <typename KeyOfExpert>
ByteMatrix count_rows(const internal::PlacementState& state, KeyOfExpert key_of_expert) {
  const int64_t row_bytes = state.shape.hidden * static_cast<int64_t>(sizeof(BFloat16));
  ByteMatrix bytes(state.ranks, std::vector<int64_t>(state.ranks));
  for (int rank = 0; rank < state.ranks; ++rank) {
    const internal::RankPlacement& own = state.rank[rank];
    for (int64_t token = 0; token < own.tokens; ++token) {
      const int32_t* const experts = own.expert_of_slot.data() + token * state.shape.topk;
      for (int64_t slot = 0; slot < state.shape.topk; ++slot) {
        if (experts[slot] < 0) continue;
        bool counted = false;
        for (int64_t earlier = 0; earlier < slot && !counted; ++earlier) {
          counted = experts[earlier] >= 0 && key_of_expert(experts[earlier]) == key_of_expert(experts[slot]);
        }
        if (!counted) bytes[rank][state.rank_of_expert[experts[slot]]] += row_bytes;
      }
    }
  }
  return bytes;
}

ByteMatrix transposed(const ByteMatrix& matrix) {
  ByteMatrix result = matrix;
  for (std::size_t row = 0; row < matrix.size(); ++row) {
    for (std::size_t column = 0; column < matrix.size(); ++column) result[column][row] = matrix[row][column];
  }
  return result;
}

}  // namespace

BytesMoved bytes_moved(const Placement& placement, const Schedule& schedule, const Numerics& numerics) {
  const internal::PlacementState& state = *placement.state();
  const auto by_expert = [](int32_t expert) { return static_cast<int64_t>(expert); };
  const auto by_rank = [&state](int32_t expert) { return static_cast<int64_t>(state.rank_of_expert[expert]); };
  const int64_t groups = numerics.combine_groups;
  const auto by_group = [&state, groups](int32_t expert) { return expert * groups / state.shape.experts; };
  return {schedule.dispatch.dedup ? count_rows(state, by_rank) : count_rows(state, by_expert),
          transposed(groups > 0 ? count_rows(state, by_group) : count_rows(state, by_expert))};
}

}  // namespace uniep::cli
