#include "tune/solve.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <unordered_set>

#include "cli/bytes_moved.h"
#include "model/place.h"
#include "program/buildable.h"
#include "program/canonical.h"
#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/built_program.h"
#include "support/command.h"
#include "support/expect_error.h"
#include "support/random_schedule_case.h"

namespace uniep::test {
namespace {

using Json = nlohmann::ordered_json;
using tune::Ranked;
using tune::Solution;
using tune::SolveRequest;

constexpr LayerShape kModels[] = {{7168, 2048, 256, 8}, {4096, 1536, 128, 8}, {2048, 768, 128, 8}, {4096, 14336, 8, 2}};

SolveRequest request_for(const LayerShape& shape, int ranks = 8, const std::string& fixed = "auto",
                         const std::string& machine = "h200", double tokens = 8192) {
  SolveRequest request;
  request.shape = shape;
  request.ranks = ranks;
  request.machine = &sim::shipped_machine(machine);
  request.loads = {tune::uniform_load(shape, ranks, tokens, *request.machine)};
  request.fixed = PartialSchedule::parse(fixed);
  return request;
}

// A request whose tokens' rows are summed by ranks before they are sent.
SolveRequest with_groups(SolveRequest request, int64_t groups) {
  request.numerics.combine_groups = groups;
  const double tokens = request.loads.front().tokens;
  request.loads = {tune::uniform_load(request.shape, request.ranks, tokens, *request.machine, groups)};
  return request;
}

ScheduleRequest scheduled(const SolveRequest& request) {
  return {.direction = request.direction,
          .shape = request.shape,
          .numerics = request.numerics,
          .machine = sim::schedule_machine(*request.machine, request.ranks)};
}

tune::Problem problem_of(const SolveRequest& request) {
  return tune::make_problem({{request.shape, request.numerics}, request.ranks, request.direction, request.state},
                            request.loads.front(), *request.machine);
}

#if defined(NDEBUG) && !defined(UNIEP_SANITIZED)
constexpr bool kTimed = true;
#else
constexpr bool kTimed = false;
#endif

// One expert a rank leaves backward no dedup to choose.
uint64_t least_points(const SolveRequest& request) {
  return request.direction == Direction::kBackward && request.shape.experts == request.ranks ? 60'000 : 100'000;
}

class SolveBothWays : public testing::TestWithParam<Direction> {
 protected:
  static SolveRequest request_for(const LayerShape& shape, int ranks = 8, const std::string& fixed = "auto",
                                  const std::string& machine = "h200", double tokens = 8192) {
    SolveRequest request = test::request_for(shape, ranks, fixed, machine, tokens);
    request.direction = GetParam();
    return request;
  }
};
INSTANTIATE_TEST_SUITE_P(Directions, SolveBothWays, testing::Values(Direction::kForward, Direction::kBackward),
                         [](const auto& of) { return of.param == Direction::kForward ? "forward" : "backward"; });

TEST_P(SolveBothWays, LooksAtAHundredThousandDistinctSchedulesInTime) {
  const auto look = [](const SolveRequest& request) {
    constexpr double kLimit = 144;
    double ms = 1e9;
    Solution solution;
    // What else the machine does can take half of a core, but not all the time.
    for (int attempt = 0; attempt < (kTimed ? 40 : 1) && ms >= kLimit; ++attempt) {
      solution = tune::solve(request);
      ms = std::min(ms, solution.solve_ms);
    }
    EXPECT_GE(solution.points, least_points(request));
    if (kTimed) {
      EXPECT_LT(ms, kLimit);
    }
    std::printf("H %ld, %ld groups: %lu schedules in %.0f ms\n", static_cast<long>(request.shape.hidden),
                static_cast<long>(request.numerics.combine_groups), static_cast<unsigned long>(solution.points), ms);
    ASSERT_FALSE(solution.best.empty());
    EXPECT_LE(solution.best.front().us, solution.default_us);
    EXPECT_GT(solution.best.front().us, solution.bound.us());
    EXPECT_FALSE(solution.gains.empty());
  };
  for (const LayerShape& shape : kModels) {
    look(request_for(shape));
    look(with_groups(request_for(shape), 8));
  }
}

TEST_P(SolveBothWays, PointsAreLegalBuildableAndRunDifferently) {
  const auto look = [](const SolveRequest& request) {
    const ScheduleRequest wanted = scheduled(request);
    const bool all = request.shape.topk == 2;  // the smallest space
    std::unordered_set<uint64_t> names;
    uint64_t points = 0, looked_at = 0;
    tune::for_each_point(request, [&](const Schedule& schedule) {
      ++points;
      if (!all && points % 61 != 0) return true;
      ++looked_at;
      names.insert(std::hash<std::string>()(to_text(canonical(schedule, wanted))));
      if (points % 61 != 0) return true;
      const auto violations = validate(schedule, wanted);
      EXPECT_TRUE(violations.empty()) << to_text(schedule) << listed(violations);
      EXPECT_TRUE(buildable(schedule, wanted).empty());
      return !HasFailure();
    });
    EXPECT_EQ(names.size(), looked_at);
    EXPECT_EQ(points, tune::solve(request).points);
  };
  for (const LayerShape& shape : kModels) {
    look(request_for(shape));
    look(with_groups(request_for(shape), 8));
  }
}

// The parts of a Schedule, worked out once each, are those of the whole, and nothing better was passed over.
TEST_P(SolveBothWays, FindsWhatLookingAtEachAloneFinds) {
  const auto look = [](const SolveRequest& request) {
    const tune::Problem problem = problem_of(request);
    double best = 1e18;
    uint64_t points = 0;
    tune::for_each_point(request, [&](const Schedule& schedule) {
      ++points;
      best = std::min(best, tune::estimate(problem, schedule).us);
      if (points % 61 == 0) {
        EXPECT_TRUE(validate(schedule, scheduled(request)).empty()) << to_text(schedule);
      }
      return true;
    });
    const Solution solution = tune::solve(request);
    EXPECT_EQ(solution.points, points);
    EXPECT_NEAR(solution.best.front().us, best, best * 1e-3) << to_text(solution.best.front().schedule);
    for (const auto& [name, value] : request.fixed.values()) {
      for (const Ranked& ranked : solution.best) {
        EXPECT_NE(to_text(ranked.schedule).find(name + "=" + value), std::string::npos) << name;
      }
    }
  };
  const bool forward = GetParam() == Direction::kForward;
  for (const char* const fixed :
       {"comm.where=warps,queue=dynamic,dispatch.transport=pull", "comm.where=sms,order.raster=16,fusion=layer",
        forward ? "order.interleave=mixed,tile.cluster=2,comm.where=warps"
                : "backward.wgrad=after,save.xg=redispatch,tile.dgrad_fc2.n=192",
        "tile.n=128,tile.stages=3,comm.reserve_sms=4", "comm.reserve_sms=16,comm.lend_sms=on"}) {
    look(request_for(kModels[2], 4, fixed));
    look(with_groups(request_for(kModels[2], 4, fixed), 4));
  }
}

TEST_P(SolveBothWays, NothingBeatsTheBound) {
  RandomBits random(3);
  int64_t compared = 0;
  for (const std::string& name : sim::shipped_machine_names()) {
    const sim::MachineDescription& machine = sim::shipped_machine(name);
    for (int i = 0; i < 40; ++i) {
      const LayerShape shape = kModels[below(random, 4)];
      const int ranks = std::min(machine.most_ranks(), pick(random, std::vector<int>{1, 2, 4, 8}));
      SolveRequest request = request_for(shape, ranks, "auto", name, 256 << below(random, 7));
      request.state = below(random, 2) == 0 ? sim::State::kSustained : sim::State::kPaused;
      if (i % 4 == 3) request = with_groups(request, ranks);
      const tune::Problem problem = problem_of(request);
      const double bound = tune::lower_bound(problem).us();
      for (int j = 0; j < 50; ++j) {
        const Schedule schedule = sample_legal(random(), scheduled(request));
        const tune::Estimate estimate = tune::estimate(problem, schedule);
        ASSERT_TRUE(std::isfinite(estimate.us)) << name << " " << to_text(schedule);
        ASSERT_GE(estimate.us, bound) << name << " " << to_text(schedule);
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 5000);
}

// Counts of workers mean whole workers that copy, and a sender of finished rows that they are staged.
TEST(Solve, WorkersThatAreGivenStay) {
  const struct {
    const char *fixed, *together;
  } cases[] = {{"comm.combine_sms=16", "combine.transport=staged"},
               {"comm.dispatch_sms=24", "comm.where=sms"},
               {"comm.reduce_sms=8,comm.chunk_bytes=2048", "comm.where=sms"}};
  for (const auto& [fixed, together] : cases) {
    const SolveRequest request = request_for(kModels[0], 8, fixed, "h200", 2048);
    for (const Ranked& ranked : tune::solve(request).best) {
      const std::string text = to_text(ranked.schedule);
      for (const auto& [name, value] : request.fixed.values()) {
        EXPECT_NE(text.find(name + "=" + value + ","), std::string::npos) << text;
      }
      EXPECT_NE(text.find(together), std::string::npos) << text;
    }
  }
}

// And fields that are for some values of others alone.
TEST(Solve, EveryPointBesideAGivenFieldIsLegal) {
  const struct {
    const char* fixed;
    std::vector<std::string> together;
  } cases[] = {{"order.second_share=5", {"order.interleave=mixed", "queue=dynamic", "fusion=layer"}},
               {"order.blocks_per_wave=16", {"order.experts_per_wave=1", "fusion=layer"}},
               {"order.experts=heavy_first", {}},
               {"comm.relay_sms=8", {"dispatch.transport=push", "comm.where=sms"}},
               {"comm.relay_sms=7", {"dispatch.transport=push", "comm.where=sms", "tile.cluster=1"}}};
  const LayerShape one_expert{4096, 14336, 8, 2};
  for (const auto& [fixed, together] : cases) {
    for (const LayerShape& shape : {kModels[0], one_expert}) {
      const SolveRequest request = request_for(shape, 8, fixed, "h200", 2048);
      int64_t points = 0, mixed = 0;
      tune::for_each_point(request, [&](const Schedule& schedule) {
        mixed += schedule.order.interleave == Interleave::kMixed;
        if (++points % 97 != 0) return true;
        EXPECT_TRUE(validate(schedule, scheduled(request)).empty()) << to_text(schedule);
        return !HasFailure();
      });
      EXPECT_GT(points, 1000) << fixed;
      // A rank with one expert has waves inside it alone.
      const bool parts = std::string(fixed).find("blocks") != std::string::npos;
      const bool shares = std::string(fixed).find("share") != std::string::npos;
      if (shape.experts == 8) {
        EXPECT_EQ(mixed > 0, parts || shares) << fixed;
      }
      for (const Ranked& ranked : tune::solve(request).best) {
        const std::string text = to_text(ranked.schedule);
        EXPECT_TRUE(validate(ranked.schedule, scheduled(request)).empty()) << text;
        EXPECT_NE(text.find(fixed), std::string::npos) << text;
        for (const std::string& field : together) EXPECT_NE(text.find(field), std::string::npos) << text;
      }
    }
  }
}

TEST(Solve, WhatIsFoundIsLegal) {
  for (const char* const fixed : {"backward.wgrad=mixed", "backward.wgrad_reserve=3", "queue=static", "auto"}) {
    SolveRequest request = request_for(kModels[2], 8, fixed, "h200", 512);
    request.direction = Direction::kBackward;
    request.best = 256;
    const ScheduleRequest wanted = {.direction = request.direction,
                                    .shape = request.shape,
                                    .numerics = request.numerics,
                                    .machine = sim::schedule_machine(*request.machine, request.ranks)};
    const Solution solution = tune::solve(request);
    EXPECT_GT(solution.best.size(), 100U);
    for (const Ranked& ranked : solution.best) {
      EXPECT_TRUE(validate(ranked.schedule, wanted).empty()) << fixed << ": " << to_text(ranked.schedule);
    }
  }
}

// The simulator's times lie above: of few tokens, of experts that get none, and of nodes whose relays hand rows on.
TEST(SolveCommand, NothingSimulatedBeatsTheBound) {
  using Words = std::vector<std::string>;
  const Words dsv3 = {"--shape", "dsv3", "--ranks", "8", "--tokens"};
  const auto of = [&](Words given) {
    Words all = dsv3;
    all.insert(all.end(), given.begin(), given.end());
    return all;
  };
  std::string uneven = "1023";
  for (int rank = 1; rank < 16; ++rank) uneven += ",1024";
  for (const Words& words :
       {of({"0"}), of({"1"}), of({"1", "--direction", "backward"}), of({"512", "--routing", "one"}),
        of({"512", "--routing", "zipf:1.2", "--direction", "backward", "--simulate", "1"}),
        Words{"--shape", "7168,256,256,8", "--machine", "h100_ib2", "--ranks", "16", "--simulate", "1", "--tokens",
              uneven}}) {
    Words line = {"solve", "--json", "-"};
    line.insert(line.end(), words.begin(), words.end());
    const CommandResult result = run_command(line);
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_GE(Json::parse(result.out)["gap"].get<double>(), -1e-6) << result.out;
  }
}

TEST(SolveCommand, ManyTokensTakeNoLonger) {
  const CommandResult result =
      run_command({"solve", "--shape", "dsv3", "--ranks", "8", "--tokens", "1000000000000", "--simulate", "0"});
  EXPECT_EQ(result.status, 0) << result.err;
}

// Each token's experts are drawn.
std::shared_ptr<const internal::PlacementState> drawn_placement(const LayerShape& shape, int ranks, int tokens,
                                                                uint64_t seed) {
  std::vector<std::vector<int32_t>> ids(ranks);
  std::vector<std::vector<float>> probs(ranks);
  RandomBits random(seed);
  std::vector<Routing> routings;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int token = 0; token < tokens; ++token) {
      std::set<int> drawn;
      while (static_cast<int64_t>(drawn.size()) < shape.topk) drawn.insert(below(random, shape.experts));
      ids[rank].insert(ids[rank].end(), drawn.begin(), drawn.end());
    }
    probs[rank].assign(ids[rank].size(), 1.0f);
    routings.push_back({tokens, ids[rank].data(), IndexType::kInt32, probs[rank].data(), {}});
  }
  return place_on_host(shape, ranks, routings, {});
}

// A relay takes a row once for its node, from uneven batches as from even ones.
TEST(Load, OfNodesCountsARowOnce) {
  const LayerShape shape{64, 64, 64, 6};
  constexpr int kRanks = 16, kTokens = 600;
  const auto placement = drawn_placement(shape, kRanks, kTokens, 7);
  const sim::MachineDescription& machine = sim::shipped_machine("h100_ib2");
  ASSERT_TRUE(machine.links.at(1).relay);
  const tune::LevelRows mean = tune::uniform_load(shape, kRanks, kTokens, machine).levels[1];
  tune::LevelRows drawn;  // the mean over ranks
  for (int rank = 0; rank < kRanks; ++rank) {
    const tune::LevelRows own = tune::load_of(*placement, rank, machine).levels[1];
    drawn.dispatched_once += own.dispatched_once / kRanks;
    drawn.sent += own.sent / kRanks;
    drawn.sent_once += own.sent_once / kRanks;
  }
  EXPECT_LT(mean.dispatched_once, 0.4 * mean.dispatched);
  EXPECT_NEAR(drawn.dispatched_once, mean.dispatched_once, 0.02 * mean.dispatched_once);
  EXPECT_NEAR(drawn.sent_once, mean.sent_once, 0.02 * mean.sent_once);
  EXPECT_NEAR(drawn.sent, mean.sent, 0.02 * mean.sent);
}

TEST(Load, OfAPlacementIsWhatItsTokensSend) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built = build(seed, Direction::kForward, {.ranks = {1, 2, 4, 8}});
    const internal::PlacementState& state = *built.placement;
    Schedule schedule = built.program->request().schedule;
    const double row = static_cast<double>(state.shape.hidden) * 2;
    for (const int each : {0, 1, 2}) {  // groups of experts a rank
      Numerics numerics;
      numerics.combine_groups = each * state.ranks;
      if (each > 0 && state.shape.experts % numerics.combine_groups != 0) continue;
      branches.count("groups", each > 0 && state.ranks > 1);
      branches.count("two groups a rank", each > 1);
      schedule.dispatch.dedup = each != 1;
      if (each > 0) schedule.combine.transport = CombineTransport::kStaged;
      const cli::BytesMoved moved = cli::bytes_moved(Placement(built.placement), schedule, numerics);
      for (int rank = 0; rank < state.ranks; ++rank) {
        const tune::RankLoad load = tune::load_of(state, rank, machine, numerics.combine_groups);
        double in = 0, out = 0, all = 0, back_in = 0, back_out = 0;
        for (int peer = 0; peer < state.ranks; ++peer) {
          all += static_cast<double>(moved.dispatch[peer][rank]);
          if (peer == rank) continue;
          in += static_cast<double>(moved.dispatch[peer][rank]);
          out += static_cast<double>(moved.dispatch[rank][peer]);
          back_in += static_cast<double>(moved.combine[peer][rank]);
          back_out += static_cast<double>(moved.combine[rank][peer]);
        }
        const double own = static_cast<double>(moved.combine[rank][rank]);
        const tune::LevelRows& rows = load.levels.at(0);
        const bool dedup = schedule.dispatch.dedup;
        ASSERT_EQ((dedup ? rows.dispatched_once : rows.dispatched) * row, in) << built.text;
        ASSERT_EQ((dedup ? rows.sent_once : rows.sent) * row, out) << built.text;
        ASSERT_EQ((dedup ? load.rows_once : load.rows) * row, all) << built.text;
        ASSERT_EQ(rows.returned * row, back_out) << built.text;
        ASSERT_EQ(rows.received * row, back_in) << built.text;
        ASSERT_EQ(load.results * row, back_out + own) << built.text;
        ASSERT_EQ(load.summands * row, back_in + own) << built.text;
      }
    }
  }
  branches.expect_all_taken();
}

TEST(Load, UniformIsTheMeanOfDrawnRoutings) {
  const LayerShape shape{64, 64, 64, 6};
  constexpr int kRanks = 4, kTokens = 2000;
  const auto placement = drawn_placement(shape, kRanks, kTokens, 5);
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  const tune::RankLoad mean = tune::uniform_load(shape, kRanks, kTokens, machine);
  const tune::RankLoad drawn = tune::load_of(*placement, 1, machine);
  EXPECT_NEAR(drawn.rows, mean.rows, mean.rows * 0.02);
  EXPECT_NEAR(drawn.rows_once, mean.rows_once, mean.rows_once * 0.02);
  EXPECT_NEAR(drawn.blocks, mean.blocks, mean.blocks * 0.03);
  EXPECT_NEAR(drawn.levels[0].dispatched, mean.levels[0].dispatched, mean.levels[0].dispatched * 0.02);
  EXPECT_NEAR(drawn.levels[0].dispatched_once, mean.levels[0].dispatched_once, mean.rows_once * 0.02);
  EXPECT_NEAR(drawn.levels[0].sent_once, mean.levels[0].sent_once, mean.rows_once * 0.02);
  for (const int64_t groups : {4, 8, 16}) {
    const tune::RankLoad expected = tune::uniform_load(shape, kRanks, kTokens, machine, groups);
    const tune::RankLoad counted = tune::load_of(*placement, 1, machine, groups);
    EXPECT_LT(expected.summands, mean.summands);
    EXPECT_NEAR(counted.summands, expected.summands, expected.summands * 0.02) << groups;
    EXPECT_NEAR(counted.results, expected.results, expected.results * 0.02) << groups;
    EXPECT_NEAR(counted.levels[0].returned, expected.levels[0].returned, expected.results * 0.02) << groups;
    EXPECT_NEAR(counted.levels[0].received, expected.levels[0].received, expected.results * 0.02) << groups;
  }
}

TEST(SolveCommand, ReportsTheChoiceTheBoundAndTheGap) {
  const CommandResult result =
      run_command({"solve", "--shape", "qwen3-30b", "--ranks", "2", "--tokens", "1024", "--json", "-"});
  ASSERT_EQ(result.status, 0) << result.err;
  const Json json = Json::parse(result.out);
  for (const char* const key : {"points", "solve_ms", "schedule", "predicted_ms", "default_ms", "predicted_by",
                                "bound_ms", "gap", "limits", "limits_ms", "fields", "best", "values", "machine"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  const double predicted = json["predicted_ms"], bound = json["bound_ms"], gap = json["gap"];
  EXPECT_LE(predicted, json["default_ms"].get<double>());
  EXPECT_NEAR(gap, predicted / bound - 1, 1e-3);
  EXPECT_EQ(json["predicted_by"], "simulator");
  EXPECT_EQ(json["best"].size(), 8U);
  // What is chosen is the fastest that was simulated.
  double fastest = json["default_ms"];
  for (const Json& one : json["best"]) fastest = std::min(fastest, one["simulated_ms"].get<double>());
  EXPECT_EQ(predicted, fastest);
  const CommandResult backward =
      run_command({"solve", "--shape", "qwen3-30b", "--ranks", "2", "--tokens", "1024", "--direction", "backward",
                   "--schedule", "backward.wgrad=fill", "--json", "-"});
  ASSERT_EQ(backward.status, 0) << backward.err;
  const Json back = Json::parse(backward.out);
  EXPECT_EQ(back["schedule"]["backward.wgrad"], "fill");
  EXPECT_LE(back["predicted_ms"].get<double>(), back["default_ms"].get<double>());
  EXPECT_GT(back["bound_ms"].get<double>(), 1.5 * bound);
  const CommandResult skewed =
      run_command({"solve", "--shape", "qwen3-30b", "--ranks", "4", "--tokens", "128,0,64,700", "--routing", "zipf:1",
                   "--simulate", "0", "--schedule", "fusion=layer,order.interleave=mixed", "--json", "-"});
  ASSERT_EQ(skewed.status, 0) << skewed.err;
  EXPECT_EQ(Json::parse(skewed.out)["schedule"]["order.interleave"], "mixed");
  EXPECT_EQ(Json::parse(skewed.out)["predicted_by"], "closed form");
}

TEST(SolveCommand, KnowsGroupsOfSums) {
  const auto report = [](std::vector<std::string> more) {
    std::vector<std::string> arguments{"solve",    "--shape", "qwen3-30b", "--ranks", "8",
                                       "--tokens", "2048",    "--json",    "-"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    return Json::parse(result.out);
  };
  for (const char* const direction : {"forward", "backward"}) {
    const Json grouped = report({"--direction", direction, "--combine-groups", "8"});
    EXPECT_EQ(grouped["schedule"]["combine.transport"], "staged");
    EXPECT_LE(grouped["predicted_ms"], grouped["default_ms"]);
    EXPECT_LT(grouped["bound_ms"], grouped["predicted_ms"]);
    const Json flat = report({"--direction", direction});
    EXPECT_LT(grouped["limits_ms"]["links"], flat["limits_ms"]["links"]);
  }
  // Of a routing that is counted, too.
  const Json skewed = report({"--combine-groups", "16", "--routing", "zipf:1", "--simulate", "0"});
  EXPECT_LT(skewed["limits_ms"]["links"], report({"--routing", "zipf:1", "--simulate", "0"})["limits_ms"]["links"]);
}

TEST(SolveCommand, SaysWhatIsWrong) {
  const auto refused = [](std::vector<std::string> more, const std::string& words) {
    std::vector<std::string> arguments{"solve", "--shape", "qwen3-30b", "--ranks", "2", "--simulate", "0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 2) << words;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  };
  refused({"--machine", "h9000"}, "--machine");
  refused({"--engine", "cpu"}, "--engine");
  refused({"--schedule", "tile.m=64"}, "tile.m=64");
  refused({"--combine-groups", "3"}, "--combine-groups: '3'");
  refused({"--combine-groups", "2", "--schedule", "combine.transport=epilogue"}, "combine.transport=epilogue");
  refused({"--workers", "8"}, "--workers");
}

}  // namespace
}  // namespace uniep::test
