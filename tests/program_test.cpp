#include <fmt/format.h>
#include <gtest/gtest.h>

#include "api/place.h"
#include "program/checker.h"
#include "program/schedule_space.h"
#include "support/random_layer.h"

// The checker over random Programs, and faults that it must notice.
namespace uniep::test {
namespace {

struct BuiltProgram {
  RandomLayer layer;
  std::unique_ptr<Program> program;
  std::string text;
};

BuiltProgram build(uint64_t seed, Direction direction, const RandomLayerLimits& limits = {},
                   const PartialSchedule& fixed = {}, int workers = 0) {
  BuiltProgram built;
  built.layer = random_layer(seed, limits);
  Random random(seed ^ 0x5555);
  std::vector<Routing> routings;
  const cli::LayerData& data = built.layer.data;
  for (int rank = 0; rank < built.layer.ranks; ++rank) {
    const int64_t first = data.first_token(rank) * data.shape.topk;
    routings.push_back({data.tokens[rank], data.ids.data() + first, IndexType::kInt32, data.probs.data() + first, {}});
  }
  Machine machine;
  machine.ranks = built.layer.ranks;
  machine.workers = workers > 0 ? workers : static_cast<int>(random.between(1, 6));
  const Numerics& numerics = built.layer.config.numerics;
  const Schedule schedule = sample_legal(random.next(), direction, data.shape, numerics, machine, fixed);
  built.text = built.layer.description + "\n" + to_text(schedule);
  ProgramRequest request{data.shape,     numerics, schedule, direction, schedule.save_xg == SaveXg::kRedispatch,
                         machine.workers};
  request.cluster = random.one_in(2) && comes_in_clusters(schedule, machine.workers, 2) ? 2 : 1;
  request.pull_parts = static_cast<int>(random.between(1, 20));
  built.text += fmt::format("\ncluster {}, pulled in {} parts", request.cluster, request.pull_parts);
  built.program = std::make_unique<Program>(request, place_on_host(data.shape, built.layer.ranks, routings, {}));
  return built;
}

TEST(Checker, PassesRandomLegalPrograms) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    const Direction direction = seed % 2 == 0 ? Direction::kForward : Direction::kBackward;
    const BuiltProgram built = build(seed, direction);
    const CheckReport report = check_program(*built.program);
    ASSERT_TRUE(report.ok) << built.text << "\n" << report.problems.front();
  }
}

// Tries seeds until the tampering met something to falsify, and says whether the checker noticed each time.
void expect_noticed(Direction direction, const std::string& fixed,
                    const std::function<CheckTampering(bool& touched)>& tampering, bool flat_only = false,
                    int workers = 0) {
  int tried = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built =
        build(seed, direction, {.ranks = {2, 4}, .most_local_experts = 6}, PartialSchedule::parse(fixed), workers);
    if (flat_only && built.layer.config.numerics.combine_groups > 0) continue;
    bool touched = false;
    const CheckReport report = check_program(*built.program, tampering(touched));
    if (!touched) continue;
    ++tried;
    EXPECT_FALSE(report.ok) << built.text;
  }
  EXPECT_GE(tried, 20);
}

TEST(Checker, NoticesASwappedThreshold) {
  expect_noticed(Direction::kForward, "", [](bool& touched) {
    CheckTampering tampering;
    tampering.wait = [&touched](int, const Task& task, CounterWait& wait) {
      if (task.stage == Stage::kSecondGemm && !touched) {
        ++wait.threshold;
        touched = true;
      }
      return true;
    };
    return tampering;
  });
}

TEST(Checker, NoticesASignalThatIsMissing) {
  expect_noticed(Direction::kBackward, "", [](bool& touched) {
    CheckTampering tampering;
    tampering.signal = [&touched](int, const Task& task, CounterSignal&) {
      const bool drop = task.stage == Stage::kFirstGemm && !touched;
      touched |= drop;
      return !drop;
    };
    return tampering;
  });
}

TEST(Checker, NoticesAMissingWait) {
  for (const Stage stage : {Stage::kFirstGemm, Stage::kSecondGemm, Stage::kWgradFc2, Stage::kWgradFc1}) {
    expect_noticed(Direction::kBackward, "", [stage](bool& touched) {
      CheckTampering tampering;
      tampering.wait = [&touched, stage](int, const Task& task, CounterWait&) {
        if (task.stage == stage) touched = true;
        return task.stage != stage;
      };
      return tampering;
    });
  }
}

TEST(Checker, NoticesAMissingWaitForAPeersFlag) {
  expect_noticed(Direction::kForward, "", [](bool& touched) {
    CheckTampering tampering;
    tampering.flag_wait = [&touched](int, const Task&, const FlagWait& wait) {
      const bool drop = wait.space == FlagSpace::kCombined || wait.space == FlagSpace::kPushed;
      touched |= drop;
      return !drop;
    };
    return tampering;
  });
}

// With groups a rank also flags token blocks that none of its rows belong to, and nobody waits for those.
TEST(Checker, NoticesAFlagThatNobodyStores) {
  expect_noticed(
      Direction::kForward, "",
      [](bool& touched) {
        CheckTampering tampering;
        tampering.flag = [&touched](int, const Task&, FlagSignal& flag) {
          const bool drop = flag.space == FlagSpace::kCombined && !touched;
          touched |= drop;
          return !drop;
        };
        return tampering;
      },
      /*flat_only=*/true);
}

TEST(Checker, NoticesATileThatIsListedTwiceOrNever) {
  for (const bool twice : {true, false}) {
    expect_noticed(Direction::kForward, "", [twice](bool& touched) {
      CheckTampering tampering;
      tampering.list = [&touched, twice](int, std::vector<Task>& list) {
        if (touched || list.size() < 2 || !list.front().has_tile() || !list.back().has_tile()) return;
        if (twice) {
          list.push_back(list.front());
        } else {
          list.pop_back();
        }
        touched = true;
      };
      return tampering;
    });
  }
}

// One worker walks its compute list in order: a list that is turned round makes FC2 wait for an FC1 behind it.
TEST(Checker, NoticesADeadlock) {
  expect_noticed(
      Direction::kForward, "fusion=layer",
      [](bool& touched) {
        CheckTampering tampering;
        tampering.list = [&touched](int, std::vector<Task>& list) {
          if (list.size() < 2 || list.front().stage != Stage::kFirstGemm || list.back().stage != Stage::kSecondGemm)
            return;
          std::reverse(list.begin(), list.end());
          touched = true;
        };
        return tampering;
      },
      /*flat_only=*/false, /*workers=*/1);
}

TEST(Order, MixedInterleavesInProportion) {
  const BuiltProgram built =
      build(12, Direction::kForward, {.ranks = {2}, .most_local_experts = 8},
            PartialSchedule::parse("fusion=layer,order.interleave=mixed,combine.column_chunks=1"));
  const RankProgram& p = built.program->rank(0);
  const int64_t length = list_length(p, 0, ListKind::kCompute);
  int64_t first = 0, second = 0;
  for (int64_t i = 0; i < length; ++i) {
    const Task task = list_task(p, 0, ListKind::kCompute, i);
    first += task.stage == Stage::kFirstGemm;
    second += task.stage == Stage::kSecondGemm;
  }
  EXPECT_EQ(first, static_cast<int64_t>(local_blocks(p)) * p.first_tiles);
  EXPECT_EQ(second, static_cast<int64_t>(local_blocks(p)) * p.chunk_tile[p.chunks]);
}

TEST(Order, ColumnChunksAreMultiplesOfEightAndSkipEmptyOnes) {
  EXPECT_EQ(column_chunk_bounds(64, 3), (std::vector<int32_t>{0, 16, 40, 64}));
  EXPECT_EQ(column_chunk_bounds(16, 8), (std::vector<int32_t>{0, 8, 16}));
  EXPECT_EQ(column_chunk_bounds(8, 5), (std::vector<int32_t>{0, 8}));
}

}  // namespace
}  // namespace uniep::test
