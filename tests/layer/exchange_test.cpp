// Dispatch and combine alone on the cpu engine, against what their definition says, byte by byte.
#include "uniep/exchange.h"

#include <gtest/gtest.h>

#include <cstring>

#include "model/elementwise.h"
#include "model/placement_state.h"
#include "support/disturb.h"
#include "support/random_layer.h"

namespace uniep {
namespace {

struct ExchangeCase {
  int ranks;
  std::vector<int64_t> tokens;
  LayerShape shape;
  int64_t groups;
  const char* schedule;
};

class Exchange {
 public:
  Exchange(const ExchangeCase& c, uint64_t seed) : case_(c), random_(seed), group_(options(c)) {
    test::disturb(group_, {.shuffle_seed = seed});
    config_.shape = c.shape;
    config_.numerics.combine_groups = c.groups;
    schedule_ = resolve(PartialSchedule::parse(c.schedule), {.direction = Direction::kForward,
                                                             .shape = c.shape,
                                                             .numerics = config_.numerics,
                                                             .machine = group_.machine()});
    std::vector<Routing> routings;
    for (const int64_t tokens : c.tokens) {
      add_routing(tokens);
      Routing routing;
      routing.tokens = tokens;
      routing.topk_ids = ids_.back().data();
      routing.probs = probs_.back().data();
      routings.push_back(routing);
    }
    placement_ = place(group_, c.shape, routings);
  }

  void expect_dispatched() {
    std::vector<std::vector<BFloat16>> x, rows;
    std::vector<std::vector<float>> row_probs;
    std::vector<DispatchArguments> arguments(case_.ranks);
    for (int rank = 0; rank < case_.ranks; ++rank) {
      x.push_back(random_values(case_.tokens[rank] * case_.shape.hidden));
      rows.emplace_back(placement_.padded_rows(rank) * case_.shape.hidden, BFloat16{0xffff});
      row_probs.emplace_back(placement_.padded_rows(rank), -7.0f);
    }
    for (int rank = 0; rank < case_.ranks; ++rank) {
      arguments[rank] = {x[rank].data(), rows[rank].data(), row_probs[rank].data(), {}};
    }
    dispatch(group_, config_, schedule_, placement_, arguments);
    for (int rank = 0; rank < case_.ranks; ++rank) {
      const std::vector<RowSource>& sources = placement_.state()->rank[rank].rows;
      for (int64_t row = 0; row < placement_.padded_rows(rank); ++row) {
        const RowSource source = sources[row];
        std::vector<BFloat16> expected(case_.shape.hidden, BFloat16{0});
        if (source.rank >= 0) {
          std::copy_n(x[source.rank].begin() + source.token * case_.shape.hidden, case_.shape.hidden, expected.begin());
        }
        ASSERT_EQ(std::memcmp(expected.data(), rows[rank].data() + row * case_.shape.hidden, expected.size() * 2), 0)
            << "rank " << rank << " row " << row;
        ASSERT_EQ(row_probs[rank][row], source.rank < 0 ? 0.0f : source.prob);
      }
    }
  }

  void expect_combined(bool with_dprobs) {
    std::vector<std::vector<BFloat16>> rows, y;
    std::vector<std::vector<float>> row_dprobs, dprobs;
    std::vector<CombineArguments> arguments(case_.ranks);
    for (int rank = 0; rank < case_.ranks; ++rank) {
      rows.push_back(random_values(placement_.padded_rows(rank) * case_.shape.hidden));
      y.emplace_back(case_.tokens[rank] * case_.shape.hidden, BFloat16{0xffff});
      row_dprobs.emplace_back();
      for (int64_t row = 0; row < placement_.padded_rows(rank); ++row)
        row_dprobs.back().push_back(static_cast<float>(random_.unit()));
      dprobs.emplace_back(case_.tokens[rank] * case_.shape.topk, -7.0f);
    }
    for (int rank = 0; rank < case_.ranks; ++rank) {
      arguments[rank] = {rows[rank].data(),
                         y[rank].data(),
                         with_dprobs ? row_dprobs[rank].data() : nullptr,
                         with_dprobs ? dprobs[rank].data() : nullptr,
                         {}};
    }
    combine(group_, config_, schedule_, placement_, arguments);
    for (int rank = 0; rank < case_.ranks; ++rank) {
      for (int64_t token = 0; token < case_.tokens[rank]; ++token) {
        const std::vector<BFloat16> expected = expected_sum(rows, rank, token);
        ASSERT_EQ(std::memcmp(expected.data(), y[rank].data() + token * case_.shape.hidden, expected.size() * 2), 0)
            << "rank " << rank << " token " << token;
        for (int64_t slot = 0; with_dprobs && slot < case_.shape.topk; ++slot) {
          const int64_t entry = token * case_.shape.topk + slot;
          const int32_t expert = ids_[rank][entry];
          const int32_t row = placement_.state()->rank[rank].row_of_slot[entry];
          const float wanted = expert < 0 ? 0.0f : row_dprobs[placement_.state()->rank_of_expert[expert]][row];
          ASSERT_EQ(dprobs[rank][entry], wanted);
        }
      }
    }
  }

 private:
  static GroupOptions options(const ExchangeCase& c) {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = c.ranks;
    options.workers = 3;
    return options;
  }

  void add_routing(int64_t tokens) {
    std::vector<int32_t> ids;
    std::vector<float> probs;
    for (int64_t token = 0; token < tokens; ++token) {
      const auto first = static_cast<int32_t>(random_.next() % case_.shape.experts);
      for (int64_t slot = 0; slot < case_.shape.topk; ++slot) {
        ids.push_back(random_.one_in(4) ? -1 : static_cast<int32_t>((first + slot) % case_.shape.experts));
        probs.push_back(static_cast<float>(random_.unit()));
      }
    }
    ids_.push_back(ids);
    probs_.push_back(probs);
  }

  std::vector<BFloat16> random_values(int64_t count) {
    std::vector<BFloat16> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(to_bfloat16(static_cast<float>(random_.unit() - 0.5)));
    return values;
  }

  std::vector<BFloat16> expected_sum(const std::vector<std::vector<BFloat16>>& rows, int rank, int64_t token) {
    const int64_t hidden = case_.shape.hidden, groups = std::max<int64_t>(case_.groups, 1);
    std::vector<float> sum(hidden, 0.0f);
    for (int64_t group = 0; group < groups; ++group) {
      std::vector<float> part(hidden, 0.0f);
      std::vector<float>& target = case_.groups > 0 ? part : sum;
      bool used = false;
      for (int64_t slot = 0; slot < case_.shape.topk; ++slot) {
        const int64_t entry = token * case_.shape.topk + slot;
        const int32_t expert = ids_[rank][entry];
        if (expert < 0 || expert / (case_.shape.experts / groups) != group) continue;
        used = true;
        const int64_t row = placement_.state()->rank[rank].row_of_slot[entry];
        const BFloat16* const summand = rows[placement_.state()->rank_of_expert[expert]].data() + row * hidden;
        for (int64_t i = 0; i < hidden; ++i) target[i] = add(target[i], to_float(summand[i]));
      }
      for (int64_t i = 0; used && case_.groups > 0 && i < hidden; ++i) {
        sum[i] = add(sum[i], to_float(to_bfloat16(part[i])));
      }
    }
    std::vector<BFloat16> rounded;
    for (const float value : sum) rounded.push_back(to_bfloat16(value));
    return rounded;
  }

  const ExchangeCase case_;
  test::Random random_;
  Group group_;
  LayerConfig config_;
  Schedule schedule_;
  std::vector<std::vector<int32_t>> ids_;
  std::vector<std::vector<float>> probs_;
  Placement placement_;
};

const ExchangeCase kCases[] = {
    {1, {40}, {24, 8, 4, 2}, 0, "auto"},
    {2, {33, 0}, {40, 16, 6, 3}, 0, "dispatch.transport=push"},
    {4, {9, 70, 0, 31}, {16, 8, 8, 4}, 0, "dispatch.dedup=off,queue=dynamic"},
    {4, {9, 70, 0, 31}, {64, 8, 16, 5}, 8, "combine.transport=staged,combine.column_chunks=3"},
    {2, {65, 40}, {32, 8, 4, 4}, 2, "combine.transport=staged,dispatch.transport=push,queue=dynamic"},
};

// Not disturbed; pulled in 1, 2, 8 and 32 parts.
const uint64_t kSeeds[] = {0, 1, 2, 7, 10};

TEST(Exchange, DispatchCopiesEveryRow) {
  for (const ExchangeCase& c : kCases) {
    for (const uint64_t seed : kSeeds) {
      SCOPED_TRACE(c.schedule);
      Exchange(c, seed).expect_dispatched();
    }
  }
}

TEST(Exchange, CombineSumsInOrder) {
  for (const ExchangeCase& c : kCases) {
    for (const uint64_t seed : kSeeds) {
      SCOPED_TRACE(c.schedule);
      Exchange exchange(c, seed);
      exchange.expect_combined(false);
      exchange.expect_combined(true);
    }
  }
}

TEST(Exchange, RefusesMissingArrays) {
  const ExchangeCase& c = kCases[0];
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  Group group(options);
  const LayerConfig config{c.shape, {}};
  const Schedule schedule =
      resolve({}, {.direction = Direction::kForward, .shape = c.shape, .machine = group.machine()});
  const std::vector<int32_t> ids{0, 1};
  const std::vector<float> probs{0.5f, 0.5f};
  Routing routing;
  routing.tokens = 1;
  routing.topk_ids = ids.data();
  routing.probs = probs.data();
  const Placement placement = place(group, c.shape, {&routing, 1});
  const DispatchArguments nothing{};
  const CombineArguments no_rows{};
  EXPECT_THROW(dispatch(group, config, schedule, placement, {&nothing, 1}), Error);
  EXPECT_THROW(combine(group, config, schedule, placement, {&no_rows, 1}), Error);
  EXPECT_THROW(combine(group, config, schedule, placement, {}), Error);
}

}  // namespace
}  // namespace uniep
