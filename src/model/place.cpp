#include "model/place.h"

#include <fmt/format.h>

#include "model/dense_routing.h"
#include "model/placement.h"
#include "model/placement_errors.h"
#include "model/refuse.h"

namespace uniep {
namespace {

constexpr int64_t kMaxDimension = int64_t{1} << 20;
constexpr int64_t kMaxRowCount = kMaxPlacedRows;

int64_t id_at(const Routing& routing, int64_t entry) {
  return routing.index_type == IndexType::kInt32 ? static_cast<const int32_t*>(routing.topk_ids)[entry]
                                                 : static_cast<const int64_t*>(routing.topk_ids)[entry];
}

[[noreturn]] void report(const RoutingProblem& problem, const Routing& routing, int rank, const LayerShape& shape) {
  const int64_t entry = problem.token * shape.topk + problem.slot;
  refuse_slot({problem.fault, rank, problem.token, problem.slot, id_at(routing, entry), routing.probs[entry],
               routing.routing_map != nullptr},
              shape.experts, shape.topk);
}

// A routing as slots. Of a dense one they are made here; routing_map still says that it was.
struct SlotRouting {
  Routing routing;
  std::vector<int32_t> ids;
  std::vector<float> probs;
};

SlotRouting slots_of(const Routing& given, const LayerShape& shape) {
  SlotRouting slots{given, {}, {}};
  if (given.routing_map == nullptr) return slots;
  slots.ids.assign(given.tokens * shape.topk, -1);
  slots.probs.assign(given.tokens * shape.topk, 0.0f);
  for (int64_t token = 0; token < given.tokens; ++token) {
    int32_t count = 0;
    for (int64_t expert = 0; expert < shape.experts; ++expert) {
      const int64_t entry = token * shape.experts + expert;
      if (given.routing_map[entry] == 0) continue;
      if (count < shape.topk) {
        slots.ids[token * shape.topk + count] = static_cast<int32_t>(expert);
        slots.probs[token * shape.topk + count] = given.probs[entry];
      }
      ++count;
    }
    if (count > shape.topk) slots.ids[token * shape.topk] = id_of_too_many(count);
  }
  slots.routing.topk_ids = slots.ids.data();
  slots.routing.index_type = IndexType::kInt32;
  slots.routing.probs = slots.probs.data();
  return slots;
}

void count_rank(internal::PlacementState& state, const Routing& routing, int rank) {
  internal::RankPlacement& own = state.rank[rank];
  own.expert_of_slot.resize(routing.tokens * state.shape.topk);
  int32_t* counts = state.counts.data() + rank * state.shape.experts;
  const RoutingProblem problem =
      routing.index_type == IndexType::kInt32
          ? count_chunk(static_cast<const int32_t*>(routing.topk_ids), routing.probs, {0, routing.tokens}, state.shape,
                        {counts, own.expert_of_slot.data()})
          : count_chunk(static_cast<const int64_t*>(routing.topk_ids), routing.probs, {0, routing.tokens}, state.shape,
                        {counts, own.expert_of_slot.data()});
  if (problem.fault != RoutingFault::kNone) report(problem, routing, rank, state.shape);
}

}  // namespace

void check_routing(const Routing& routing, int rank, const LayerShape& shape) {
  if (routing.tokens < 0) refuse(fmt::format("tokens: {} on rank {}; must be 0 or more", routing.tokens, rank));
  if (routing.tokens > kMaxRowCount / shape.topk) {
    refuse(fmt::format("tokens: {} on rank {} with top-k {} exceed {} slots", routing.tokens, rank, shape.topk,
                       kMaxRowCount));
  }
  if (routing.topk_ids != nullptr && routing.routing_map != nullptr) {
    refuse(fmt::format("routing_map: given beside topk_ids on rank {}; a routing is one of the two", rank));
  }
  if (routing.tokens > 0 && routing.topk_ids == nullptr && routing.routing_map == nullptr) {
    refuse(fmt::format("topk_ids: null on rank {}", rank));
  }
  if (routing.tokens > 0 && routing.probs == nullptr) refuse(fmt::format("probs: null on rank {}", rank));
}

void check_shape(const LayerShape& shape, int ranks) {
  const auto check_columns = [](const char* name, int64_t value) {
    if (value < 8 || value % 8 != 0 || value > kMaxDimension) {
      refuse(fmt::format("{}: {}; must be a multiple of 8 from 8 to {}", name, value, kMaxDimension));
    }
  };
  check_columns("hidden", shape.hidden);
  check_columns("intermediate", shape.intermediate);
  if (shape.experts < 1 || shape.experts > kMaxDimension) {
    refuse(fmt::format("experts: {}; must be 1 to {}", shape.experts, kMaxDimension));
  }
  if (shape.experts % ranks != 0) {
    refuse(fmt::format("experts: {} can not be divided evenly over {} ranks", shape.experts, ranks));
  }
  if (shape.topk < 1 || shape.topk > shape.experts) {
    refuse(fmt::format("topk: {}; must be 1 to the number of experts, {}", shape.topk, shape.experts));
  }
}

void require_slots(int64_t slots) {
  if (slots > kMaxRowCount) refuse(fmt::format("tokens: {} slots in all; at most {}", slots, kMaxRowCount));
}

std::shared_ptr<internal::PlacementState> begin_placement(const LayerShape& shape, int ranks, RankSpan local,
                                                          std::span<const Routing> routings, Capacity capacity) {
  check_shape(shape, ranks);
  if (routings.size() != static_cast<std::size_t>(local.count)) {
    refuse(
        fmt::format("routings: {} given; one for each of the {} local ranks is needed", routings.size(), local.count));
  }
  if (capacity.rows < 0 || capacity.rows > kMaxRowCount) {
    refuse(fmt::format("capacity.rows: {}; must be 0 (by need) to {}", capacity.rows, kMaxRowCount));
  }
  if (capacity.tokens < 0) refuse(fmt::format("capacity.tokens: {}; must be 0 (unknown) or more", capacity.tokens));
  if (capacity.rows > 0 && capacity.tokens == 0 && local.count < ranks) {
    refuse("capacity.tokens: 0; with a process a rank a fixed capacity needs the most tokens of any rank");
  }
  require_slots(capacity.tokens <= kMaxRowCount ? ranks * capacity.tokens * shape.topk : capacity.tokens);

  auto state = std::make_shared<internal::PlacementState>();
  state->shape = shape;
  state->ranks = ranks;
  state->capacity = capacity.rows;
  state->placed_by = state->local = local;
  state->rank.resize(ranks);
  for (int rank = 0; rank <= ranks; ++rank) {
    state->expert_begin.push_back(static_cast<int32_t>(rank * shape.experts / ranks));
  }
  for (internal::RankPlacement& rank : state->rank) rank.tokens = capacity.tokens;
  int64_t slots = 0;
  for (std::size_t i = 0; i < routings.size(); ++i) {
    const int rank = local.first + static_cast<int>(i);
    check_routing(routings[i], rank, shape);
    if (capacity.tokens > 0 && routings[i].tokens > capacity.tokens) {
      refuse(fmt::format("tokens: {} on rank {}; capacity.tokens allows at most {}", routings[i].tokens, rank,
                         capacity.tokens));
    }
    state->rank[rank].tokens = routings[i].tokens;
    state->rank[rank].dense = routings[i].routing_map != nullptr;
    slots += routings[i].tokens * shape.topk;
  }
  require_slots(slots);
  state->counts.assign(ranks * shape.experts, 0);
  return state;
}

void lay_out_counts(internal::PlacementState& state) {
  lay_out_rows(state);
  for (int rank = 0; rank < state.ranks; ++rank) {
    const int64_t limit = state.capacity > 0 ? state.capacity : kMaxRowCount;
    if (state.padded_rows[rank] <= limit) continue;
    int64_t need = 0;
    int32_t expert = state.expert_begin[rank];
    while (need <= limit) need += round_up(state.expert_rows[expert++], kRowAlignment);
    refuse_rows({rank, state.padded_rows[rank], limit, expert - 1, state.expert_rows[expert - 1]});
  }
}

std::shared_ptr<internal::PlacementState> place_on_host(const LayerShape& shape, int ranks,
                                                        std::span<const Routing> routings, Capacity capacity) {
  std::shared_ptr<internal::PlacementState> state = begin_placement(shape, ranks, {0, ranks}, routings, capacity);
  std::vector<SlotRouting> slots;
  for (const Routing& routing : routings) slots.push_back(slots_of(routing, shape));
  for (int rank = 0; rank < ranks; ++rank) count_rank(*state, slots[rank].routing, rank);
  lay_out_counts(*state);

  for (int rank = 0; rank < ranks; ++rank) {
    internal::RankPlacement& own = state->rank[rank];
    own.rows.assign(state->padded_rows[rank], RowSource{-1, -1, -1, 0.0f});
    own.row_of_slot.resize(own.expert_of_slot.size());
    std::vector<int32_t> next_row = first_rows(*state, rank);
    assign_chunk(own.expert_of_slot.data(), {0, own.tokens}, shape.topk, next_row.data(), own.row_of_slot.data());
    own.token_order = order_by_last_expert(own.expert_of_slot, own.tokens, shape, ranks);
  }
  for (int source = 0; source < ranks; ++source) write_row_tables(*state, source, slots[source].routing.probs);
  return state;
}

namespace {

// Calls read(state) with a state whose counts are on the host.
template <typename Read>
int64_t with_counts(const internal::PlacementState& state, Read&& read) {
  return state.counts_on_devices ? read(state.engine_tables->with_counts(state)) : read(state);
}

const internal::PlacementState& placed(const std::shared_ptr<const internal::PlacementState>& state) {
  if (state == nullptr) refuse("placement: empty; call place() first");
  return *state;
}
const internal::PlacementState& placed_for_rank(const std::shared_ptr<const internal::PlacementState>& state,
                                                int rank) {
  check_index(rank, 0, placed(state).ranks, "rank");
  return *state;
}
const internal::PlacementState& placed_for_expert(const std::shared_ptr<const internal::PlacementState>& state,
                                                  int64_t expert) {
  check_index(expert, 0, placed(state).shape.experts, "expert");
  return *state;
}

}  // namespace

int64_t Placement::rows(int rank) const {
  return with_counts(placed_for_rank(state_, rank), [&](const auto& state) { return state.rows.at(rank); });
}
int64_t Placement::padded_rows(int rank) const {
  return with_counts(placed_for_rank(state_, rank), [&](const auto& state) { return state.padded_rows.at(rank); });
}
int64_t Placement::tokens(int rank) const {
  const internal::PlacementState& own = placed_for_rank(state_, rank);
  const auto tokens = [rank](const internal::PlacementState& state) { return state.rank.at(rank).tokens; };
  return own.local.contains(rank) ? tokens(own) : with_counts(own, tokens);
}
bool Placement::dense(int rank) const {
  const internal::RankSpan local = placed(state_).local;
  check_index(rank, local.first, local.first + local.count, "rank");
  return state_->rank.at(rank).dense;
}
int64_t Placement::expert_rows(int64_t expert) const {
  return with_counts(placed_for_expert(state_, expert),
                     [&](const auto& state) { return state.expert_rows.at(expert); });
}
int64_t Placement::expert_segment(int64_t expert) const {
  return with_counts(placed_for_expert(state_, expert),
                     [&](const auto& state) { return state.segment_start.at(expert); });
}
int64_t Placement::routed(int source_rank, int64_t expert) const {
  check_index(source_rank, 0, placed(state_).ranks, "source_rank");
  return with_counts(placed_for_expert(state_, expert),
                     [&](const auto& state) { return state.counts.at(source_rank * state.shape.experts + expert); });
}

}  // namespace uniep
