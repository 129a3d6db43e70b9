#include "model/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "model/place.h"
#include "support/branch_counts.h"
#include "support/built_program.h"
#include "support/random_layer.h"

namespace uniep::test {
namespace {

std::shared_ptr<const internal::PlacementState> place_data(const cli::LayerData& data, int ranks,
                                                           Capacity capacity = {}) {
  std::vector<Routing> routings;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t first = data.first_token(rank) * data.shape.topk;
    routings.push_back({data.tokens[rank], data.ids.data() + first, IndexType::kInt32, data.probs.data() + first, {}});
  }
  return place_on_host(data.shape, ranks, routings, capacity);
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

// Walks the global batch in order and says where each slot must stand: a second way to the same rows.
TEST(Placement, RowsStandInGlobalBatchOrder) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const RandomLayer layer = random_layer(seed);
    count_layer(branches, layer);
    const auto state = place_data(layer.data, layer.ranks);
    const int64_t experts = layer.data.shape.experts, topk = layer.data.shape.topk;
    std::vector<int32_t> next(experts, 0);
    for (int rank = 0; rank < layer.ranks; ++rank) {
      const internal::RankPlacement& own = state->rank[rank];
      for (int64_t entry = 0; entry < own.tokens * topk; ++entry) {
        const int32_t expert = layer.data.ids[layer.data.first_token(rank) * topk + entry];
        if (expert < 0) {
          ASSERT_EQ(own.row_of_slot[entry], -1);
          continue;
        }
        const int owner = state->rank_of_expert[expert];
        const int32_t row = state->segment_start[expert] + next[expert]++;
        ASSERT_EQ(own.row_of_slot[entry], row) << layer.description;
        const RowSource source = state->rank[owner].rows[row];
        ASSERT_EQ(source.rank, rank);
        ASSERT_EQ(source.token, entry / topk);
        ASSERT_EQ(source.slot, entry % topk);
      }
    }
    for (int64_t expert = 0; expert < experts; ++expert) {
      ASSERT_EQ(next[expert], state->expert_rows[expert]);
      ASSERT_EQ(state->segment_start[expert] % kRowAlignment, 0);
    }
  }
  branches.expect_all_taken();
}

// What a rank finds of every rank's slots, beside the rows that it knows by itself.
TEST(Placement, EveryRankFindsItsRowsOfAllRanksSlots) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built = build(seed, seed % 2 == 0 ? Direction::kForward : Direction::kBackward);
    const internal::PlacementState& state = *built.placement;
    for (int rank = 0; rank < state.ranks; ++rank) {
      const program::RankProgram& p = built.program->rank(rank);
      int64_t found = 0;
      for (int source = 0; source < state.ranks; ++source) {
        for (int32_t token = 0; token < state.rank[source].tokens; ++token) {
          for (int32_t slot = 0; slot < p.topk; ++slot) {
            const int32_t row = program::row_here(p, source, program::first_entry(p, source, token) + slot);
            const int32_t expert = state.rank[source].expert_of_slot[token * p.topk + slot];
            branches.count("an unused slot", expert < 0);
            branches.count("a slot of another rank's expert", expert >= 0 && row < 0);
            branches.count("a slot of another rank's token", row >= 0 && source != rank);
            if (row < 0) continue;
            ++found;
            const RowSource& of_row = state.rank[rank].rows[row];
            ASSERT_EQ(of_row.rank, source) << built.text;
            ASSERT_EQ(of_row.token, token) << built.text;
            ASSERT_EQ(of_row.slot, slot) << built.text;
          }
        }
      }
      ASSERT_EQ(found, state.rows[rank]) << built.text;  // all of them, each once
    }
  }
  branches.expect_all_taken();
}

// The local number of a token's last expert, 0 without one.
int32_t last_expert(const internal::RankPlacement& rank, int64_t token, int64_t topk, int64_t local_experts) {
  int64_t last = 0;
  for (int64_t slot = 0; slot < topk; ++slot) {
    const int32_t expert = rank.expert_of_slot[token * topk + slot];
    if (expert >= 0) last = std::max(last, expert % local_experts);
  }
  return static_cast<int32_t>(last);
}

TEST(Placement, TokensAreSummedInTheOrderOfTheirLastExperts) {
  int64_t moved = 0, shared_classes = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    // Up to 32 experts a rank each has a class of its own, with more they share them.
    const RandomLayer layer = seed % 2 == 0 ? random_layer(seed) : random_layer(seed, {.most_local_experts = 100});
    const auto state = place_data(layer.data, layer.ranks);
    const int64_t local_experts = layer.data.shape.experts / layer.ranks, topk = layer.data.shape.topk;
    shared_classes += local_experts > 32;
    for (const internal::RankPlacement& own : state->rank) {
      std::vector<int32_t> expected(own.tokens);
      std::iota(expected.begin(), expected.end(), 0);
      std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
        const auto part = [&](int32_t token) {
          return last_expert(own, token, topk, local_experts) * 32 / local_experts;
        };
        return part(a) < part(b);
      });
      ASSERT_EQ(own.token_order, expected) << layer.description;
      moved += !std::is_sorted(expected.begin(), expected.end());
    }
  }
  EXPECT_GT(moved, 50);
  EXPECT_GT(shared_classes, 20);
}

TEST(Placement, ChunksMayBeCountedAndAssignedApart) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const RandomLayer layer = random_layer(seed, {.ranks = {1}, .most_tokens = 48, .fewest_tokens = 30});
    const LayerShape& shape = layer.data.shape;
    const int64_t tokens = layer.data.all_tokens();
    const auto state = place_data(layer.data, 1);
    const int64_t cut = tokens / 3;
    std::vector<int32_t> first(shape.experts, 0), second(shape.experts, 0), experts(tokens * shape.topk), rows(experts);
    const int32_t* ids = layer.data.ids.data();
    ASSERT_EQ(count_chunk(ids, layer.data.probs.data(), {cut, tokens}, shape, {second.data(), experts.data()}).fault,
              RoutingFault::kNone);
    ASSERT_EQ(count_chunk(ids, layer.data.probs.data(), {0, cut}, shape, {first.data(), experts.data()}).fault,
              RoutingFault::kNone);
    std::vector<int32_t> next = first_rows(*state, 0), next_of_second = next;
    for (int64_t expert = 0; expert < shape.experts; ++expert) next_of_second[expert] += first[expert];
    assign_chunk(experts.data(), {cut, tokens}, shape.topk, next_of_second.data(), rows.data());
    assign_chunk(experts.data(), {0, cut}, shape.topk, next.data(), rows.data());
    EXPECT_EQ(rows, state->rank[0].row_of_slot);
    branches.count("several experts", shape.experts > 1);
    branches.count("several slots a token", shape.topk > 1);
    branches.count("unused slots", std::find(layer.data.ids.begin(), layer.data.ids.end(), -1) != layer.data.ids.end());
  }
  branches.expect_all_taken();
}

TEST(Placement, Int64IdsGiveTheSameRows) {
  const RandomLayer layer = random_layer(5, {.ranks = {1}, .fewest_tokens = 8});
  const std::vector<int64_t> wide(layer.data.ids.begin(), layer.data.ids.end());
  const Routing routing{layer.data.tokens[0], wide.data(), IndexType::kInt64, layer.data.probs.data(), {}};
  const auto state = place_on_host(layer.data.shape, 1, std::span(&routing, 1), {});
  EXPECT_EQ(state->rank[0].row_of_slot, place_data(layer.data, 1)->rank[0].row_of_slot);
}

TEST(Placement, BadRoutingsAreNamed) {
  const LayerShape shape{64, 64, 8, 2};
  std::vector<int32_t> ids{0, 1, 2, 3};
  std::vector<float> probs(4, 0.5f);
  const auto place_it = [&] {
    const std::vector<Routing> routings{{1, ids.data(), IndexType::kInt32, probs.data(), {}},
                                        {1, ids.data() + 2, IndexType::kInt32, probs.data() + 2, {}}};
    place_on_host(shape, 2, routings, {});
  };
  ids[3] = 8;
  EXPECT_EQ(refusal(place_it), "topk_ids: rank 1, token 0, slot 1 holds 8; legal are 0 to 7 and -1 for an unused slot");
  ids[3] = -2;
  EXPECT_EQ(refusal(place_it),
            "topk_ids: rank 1, token 0, slot 1 holds -2; legal are 0 to 7 and -1 for an unused slot");
  ids[3] = 2;
  EXPECT_EQ(refusal(place_it),
            "topk_ids: rank 1, token 0, slot 1 names expert 2 a second time; a token's experts must differ");
  ids[3] = 3;
  probs[2] = std::nanf("");
  EXPECT_EQ(refusal(place_it), "probs: rank 1, token 0, slot 0 is nan; probs must be finite");
  probs[2] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(refusal(place_it), "probs: rank 1, token 0, slot 0 is inf; probs must be finite");
  ids[2] = -1;  // an unused slot's prob is ignored
  EXPECT_EQ(refusal(place_it), "nothing was refused");
}

TEST(Placement, BadShapesAreNamed) {
  EXPECT_EQ(refusal([] { check_shape({60, 64, 8, 2}, 1); }), "hidden: 60; must be a multiple of 8 from 8 to 1048576");
  EXPECT_EQ(refusal([] {
              check_shape({64, 0, 8, 2}, 1);
            }),
            "intermediate: 0; must be a multiple of 8 from 8 to 1048576");
  EXPECT_EQ(refusal([] { check_shape({64, 64, 9, 2}, 2); }), "experts: 9 can not be divided evenly over 2 ranks");
  EXPECT_EQ(refusal([] { check_shape({64, 64, 8, 9}, 2); }), "topk: 9; must be 1 to the number of experts, 8");
}

TEST(Placement, OverflowOfCapacityNamesRankExpertNeedAndCapacity) {
  RandomLayer layer = random_layer(9, {.ranks = {1}});
  layer.data.shape = {64, 64, 4, 1};
  layer.data.tokens = {300};
  layer.data.ids.assign(300, 2);
  layer.data.probs.assign(300, 1.0f);
  EXPECT_EQ(place_data(layer.data, 1, {384})->padded_rows[0], 384);
  try {
    place_data(layer.data, 1, {256});
    FAIL() << "256 rows can not hold 300";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kOverflow);
    EXPECT_STREQ(error.what(),
                 "capacity: rank 0 needs 384 rows (padded to 128 an expert) but has 256; expert 2 with 300 rows is the "
                 "first that does not fit");
  }
  EXPECT_EQ(refusal([&] { place_data(layer.data, 1, {int64_t{1} << 60}); }),
            "capacity.rows: 1152921504606846976; must be 0 (by need) to 2147483519");
  EXPECT_EQ(refusal([&] { place_data(layer.data, 1, {-1}); }), "capacity.rows: -1; must be 0 (by need) to 2147483519");
}

}  // namespace
}  // namespace uniep::test
