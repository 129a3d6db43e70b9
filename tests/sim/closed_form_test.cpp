#include "tune/closed_form.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "cli/solve_request.h"
#include "program/schedule_space.h"
#include "support/built_program.h"
#include "support/measured_layers.h"
#include "support/random_schedule_case.h"
#include "tune/solve.h"

// The closed form against measured layers (tests/data/measured_layers.json: H200, one to eight GPUs), and against the
// simulator.
namespace uniep::test {
namespace {

using tune::RankLoad;

// bench/remote_routing.py: seven slots of eight go to other ranks.
RankLoad remote_load(const MeasuredLayer& row) {
  RankLoad load =
      tune::uniform_load(row.shape, row.ranks, static_cast<double>(row.tokens), sim::shipped_machine("h200"));
  if (row.ranks != 2) return load;
  const double experts = load.local_experts, per_expert = load.rows / experts;
  const auto choose = [](double n, int k) {
    double ways = 1;
    for (int i = 0; i < k; ++i) ways *= (n - i) / (i + 1);
    return n < k ? 0 : ways;
  };
  load.rows_once = 0;
  for (int expert = 0; expert < experts; ++expert) {
    load.rows_once += per_expert * (7.0 / 8 * choose(experts - 1 - expert, 6) / choose(experts - 1, 6) + 1.0 / 8);
  }
  tune::LevelRows& rows = load.levels[0];
  rows.dispatched = rows.returned = rows.sent = rows.received = load.rows * 7 / 8;
  rows.dispatched_once = rows.sent_once = load.rows_once - load.rows / 8;
  return load;
}

tune::Problem problem_of(const MeasuredLayer& row) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  const RankLoad load = row.routing == "seven_eighths_remote"
                            ? remote_load(row)
                            : tune::uniform_load(row.shape, row.ranks, static_cast<double>(row.tokens), machine);
  Numerics numerics;
  if (row.wgrad == "main_grad") numerics.weight_gradient = WeightGradient::kMainGrad;
  return tune::make_problem({{row.shape, numerics}, row.ranks, row.direction, row.state}, load, machine);
}

struct Errors {
  std::vector<double> errors;
  double mean() const {
    double sum = 0;
    for (const double error : errors) sum += error;
    return sum / static_cast<double>(errors.size());
  }
  double ninety() {
    std::sort(errors.begin(), errors.end());
    return errors[errors.size() * 9 / 10];
  }
};

TEST(ClosedForm, PredictsMeasuredLayers) {
  Errors all;
  std::map<std::string, std::vector<std::pair<double, double>>> runs;
  for (const MeasuredLayer& row : read_measured_layers(UNIEP_TEST_DATA "/measured_layers.json")) {
    if (row.direction != Direction::kForward || row.machine != "h200") continue;
    const Machine machine = sim::schedule_machine(sim::shipped_machine("h200"), row.ranks);
    const Schedule schedule = fill(PartialSchedule::parse(row.schedule),
                                   {.direction = Direction::kForward, .shape = row.shape, .machine = machine});
    const double ms = tune::estimate(problem_of(row), schedule).us * 1e-3;
    all.errors.push_back(std::abs(ms / row.ms - 1));
    runs[row.session].emplace_back(ms, row.ms);
    if (std::getenv("UNIEP_TEST_VERBOSE") != nullptr) {
      std::printf("%+6.1f %% %7.3f -> %7.3f %s %ld %d %s\n", 100 * (ms / row.ms - 1), row.ms, ms, row.session.c_str(),
                  static_cast<long>(row.shape.hidden), row.ranks, to_text(schedule).c_str());
    }
  }
  ASSERT_GE(all.errors.size(), 280U);
  // Schedules measured one after the other, their common factor taken out.
  Errors ratios;
  for (const auto& [run, points] : runs) {
    double scale = 0;
    for (const auto& [predicted, ms] : points) scale += std::log(ms / predicted);
    scale = std::exp(scale / static_cast<double>(points.size()));
    for (const auto& [predicted, ms] : points) {
      if (points.size() > 1) ratios.errors.push_back(std::abs(predicted * scale / ms - 1));
    }
  }
  std::printf("%zu layers: mean error %.2f %%, nine of ten within %.1f %%; inside a run %.2f %%, %.1f %%\n",
              all.errors.size(), 100 * all.mean(), 100 * all.ninety(), 100 * ratios.mean(), 100 * ratios.ninety());
  EXPECT_LT(all.mean(), 0.042);
  EXPECT_LT(all.ninety(), 0.105);
  EXPECT_LT(ratios.mean(), 0.025);
}

TEST(ClosedForm, PredictsMeasuredBackwardLayers) {
  Errors all;
  for (const MeasuredLayer& row : read_measured_layers(UNIEP_TEST_DATA "/measured_layers.json")) {
    if (row.direction != Direction::kBackward || row.machine != "h200") continue;
    const Machine machine = sim::schedule_machine(sim::shipped_machine("h200"), row.ranks);
    const Schedule schedule = fill(PartialSchedule::parse(row.schedule),
                                   {.direction = Direction::kBackward, .shape = row.shape, .machine = machine});
    all.errors.push_back(std::abs(tune::estimate(problem_of(row), schedule).us * 1e-3 / row.ms - 1));
  }
  ASSERT_GE(all.errors.size(), 30U);
  std::printf("%zu layers: mean error %.2f %%, nine of ten within %.1f %%\n", all.errors.size(), 100 * all.mean(),
              100 * all.ninety());
  EXPECT_LT(all.mean(), 0.035);
  EXPECT_LT(all.ninety(), 0.08);
}

// A layer of a random shape, on a random number of ranks.
struct SimulatedLayer {
  tune::SolveRequest request;
  Placement placement;
  ScheduleRequest scheduled() const {
    return {.direction = request.direction,
            .shape = request.shape,
            .numerics = request.numerics,
            .machine = sim::schedule_machine(*request.machine, request.ranks)};
  }
  double us(const Schedule& schedule) const {
    const Program program(
        sim::simulated_request(request.shape, request.numerics, schedule, request.direction, *request.machine),
        placement.state());
    return sim::simulate(program, *request.machine, {.state = request.state, .one_rank = true}).ms * 1e3;
  }
};

// With groups: as many as ranks, or twice as many.
SimulatedLayer random_layer(RandomBits& random, Direction direction, bool groups) {
  static const std::vector<LayerShape> kShapes = {{7168, 2048, 64, 8}, {4096, 1536, 32, 8}, {2048, 768, 64, 8},
                                                  {5120, 1536, 40, 6}, {2880, 2880, 16, 4}, {4096, 14336, 8, 2}};
  SimulatedLayer layer;
  cli::LayerOptions options;
  options.shape = pick(random, kShapes);
  options.ranks = pick(random, std::vector<int>{1, 2, 4, 8});
  options.tokens_given = {int64_t{512} << below(random, 4)};
  options.numerics.weight_gradient = below(random, 4) == 0 ? WeightGradient::kFloat32 : WeightGradient::kBFloat16;
  const auto state = below(random, 4) == 0 ? sim::State::kPaused : sim::State::kSustained;
  if (groups) {
    const int twice = options.shape.experts % (2 * options.ranks) == 0 ? below(random, 2) : 0;
    options.numerics.combine_groups = options.ranks * (1 + twice);
  }
  layer.request =
      cli::solve_request({options, direction, state}, sim::shipped_machine(sim::kDefaultMachine), Placement());
  layer.placement = cli::place_ids(options, cli::make_ids(options));
  return layer;
}

#ifdef UNIEP_SANITIZED
constexpr bool kAllLayers = false;
#else
constexpr bool kAllLayers = true;
#endif

// Random legal schedules that lend no SMs, random ones that lend some, as a job would, and random ones of those that
// the solver looks at.
struct NearSimulator {
  Errors legal, lent, solved;
};
NearSimulator compare_with_simulator(Direction direction, bool groups) {
  NearSimulator near;
  RandomBits random(direction == Direction::kForward ? 11 : 12);
  double tightest = 1e9;
  const auto look = [&] {
    for (int i = 0; i < (kAllLayers ? 28 : 4); ++i) {
      const SimulatedLayer layer = random_layer(random, direction, groups);
      const tune::Problem problem = tune::problem_of(layer.request, layer.request.loads.front());
      const double bound = tune::lower_bound(problem).us();
      const auto compare = [&](const Schedule& schedule, Errors& errors) {
        const double us = layer.us(schedule);
        ASSERT_LE(bound, us) << to_text(schedule);
        tightest = std::min(tightest, us / bound);
        errors.errors.push_back(std::abs(tune::estimate(problem, schedule).us / us - 1));
      };
      const auto sample = [&](const std::string& given) {
        return sample_legal(random(), layer.scheduled(), PartialSchedule::parse(given));
      };
      for (int j = 0; j < 3; ++j) compare(sample("comm.lend_sms=off"), near.legal);
      const int lent = 2 * static_cast<int>(1 + below(random, 12));
      compare(sample("comm.lend_sms=on,comm.reserve_sms=" + std::to_string(lent)), near.lent);
      const uint64_t points = tune::solve(layer.request).points, every = points / 4;
      uint64_t at = below(random, static_cast<int64_t>(every)), point = 0;
      tune::for_each_point(layer.request, [&](const Schedule& schedule) {
        if (point++ != at) return true;
        at += every;
        compare(schedule, near.solved);
        return !testing::Test::HasFatalFailure();
      });
    }
  };
  look();
  std::printf(
      "%s%s: of random legal schedules %.2f %%, of the solver's %.2f %%, nine of ten within %.1f and %.1f %%; %.2f; "
      "of lent ones %.2f %%\n",
      direction == Direction::kForward ? "forward" : "backward", groups ? " with groups" : "", 100 * near.legal.mean(),
      100 * near.solved.mean(), 100 * near.legal.ninety(), 100 * near.solved.ninety(), tightest,
      100 * near.lent.mean());
  return near;
}

TEST(ClosedForm, IsNearTheSimulatorAndItsBoundBelow) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const NearSimulator near = compare_with_simulator(direction, false);
    if (!kAllLayers || HasFatalFailure()) continue;
    EXPECT_LT(near.legal.mean(), direction == Direction::kForward ? 0.15 : 0.035);
    EXPECT_LT(near.solved.mean(), direction == Direction::kForward ? 0.16 : 0.055);
    EXPECT_LT(near.lent.mean(), direction == Direction::kForward ? 0.10 : 0.035);
  }
}

TEST(ClosedForm, WithGroupsIsAsNear) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const NearSimulator near = compare_with_simulator(direction, true);
    if (!kAllLayers || HasFatalFailure()) continue;
    EXPECT_LT(near.legal.mean(), direction == Direction::kForward ? 0.10 : 0.035);
    EXPECT_LT(near.solved.mean(), direction == Direction::kForward ? 0.13 : 0.055);
    EXPECT_LT(near.lent.mean(), direction == Direction::kForward ? 0.07 : 0.035);
  }
}

// Groups of sums have terms of their own; without them nothing may move.
TEST(ClosedForm, WithoutGroupsGivesFixedTimes) {
  sim::MachineDescription machine = sim::shipped_machine("h800");  // no fit moves its numbers
  sim::LinkRate& eight = machine.links.back().rates.back();
  ASSERT_EQ(eight.ranks, 8);
  eight.read = 134, eight.write = 138, eight.both = 126;  // those of the numbers below
  const LayerShape shape{4096, 1536, 128, 8};
  std::vector<double> expected = {2312.289475666, 2360.890708563, 2418.465673812, 3384.836274501, 2288.983787163,
                                  3733.055220431, 3330.261861810, 3395.591389175, 3348.335213563, 4743.903376581,
                                  3221.770933472, 4555.068470469, 4088.215969558, 4262.092016094, 4365.826541297,
                                  5120.084148364, 4080.311738398, 4200.009579736, 4003.591616860, 4160.157565255,
                                  4593.882694223, 6207.577320033, 3994.834520332, 4412.690343898};
  auto next = expected.begin();
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const int ranks : {2, 8}) {
      const std::string fusion = direction == Direction::kForward ? "layer" : "pairs";
      for (const std::string& given :
           {"fusion=" + fusion, "combine.transport=staged,combine.column_chunks=3,fusion=" + fusion,
            "comm.where=sms,comm.dispatch_sms=24,comm.combine_sms=8,comm.reduce_sms=8,fusion=" + fusion,
            std::string("fusion=none,combine.transport=staged"),
            std::string(direction == Direction::kForward ? "fusion=pairs" : "fusion=layer,backward.wgrad=fill"),
            std::string("fusion=pairs,comm.where=sms,comm.dispatch_sms=16,combine.transport=staged")}) {
        const Schedule schedule =
            resolve(PartialSchedule::parse(given),
                    {.direction = direction, .shape = shape, .machine = sim::schedule_machine(machine, ranks)});
        const tune::Problem problem = tune::make_problem({{shape, {}}, ranks, direction},
                                                         tune::uniform_load(shape, ranks, 4096, machine), machine);
        ASSERT_NE(next, expected.end());
        EXPECT_NEAR(tune::estimate(problem, schedule).us, *next, *next * 1e-9) << to_text(schedule);
        ++next;
      }
    }
  }
}

TEST(ClosedForm, GroupsSendAndSumLessAndWaitForAllExperts) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  const LayerShape shape{7168, 2048, 256, 8};
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const auto problem = [&](int64_t groups) {
      LayerConfig layer{shape, {}};
      layer.numerics.combine_groups = groups;
      return tune::make_problem({layer, 8, direction}, tune::uniform_load(shape, 8, 8192, machine, groups), machine);
    };
    const auto schedule = [&](const char* given) {
      return resolve(PartialSchedule::parse(given),
                     {.direction = direction, .shape = shape, .machine = sim::schedule_machine(machine, 8)});
    };
    const tune::Problem flat = problem(0), few = problem(8), many = problem(16), one_expert_each = problem(256);
    const Schedule by_warps = schedule("combine.transport=staged,comm.where=warps,combine.column_chunks=2");
    const auto part = [&](const tune::Problem& of) { return tune::combine_part(of, by_warps); };
    // 8 slots meet 5.3 of 8 groups, and 6.4 of 16.
    EXPECT_NEAR(part(few).link / part(flat).link, 5.29 / 8, 0.01);
    EXPECT_NEAR(part(many).link / part(flat).link, 6.47 / 8, 0.01);
    EXPECT_NEAR(part(few).sum / part(flat).sum, 6.29 / 9, 0.01);
    EXPECT_NEAR(part(one_expert_each).link, part(flat).link, 1e-6 * part(flat).link);
    EXPECT_LT(tune::lower_bound(few).links, tune::lower_bound(many).links);
    EXPECT_LT(tune::lower_bound(many).links, tune::lower_bound(flat).links);
    // The results of all but the last column chunk are sent while tiles run.
    const auto us = [&](int64_t groups, const char* given) {
      return tune::estimate(problem(groups), schedule(given)).us;
    };
    const char* const whole =
        "fusion=pairs,backward.wgrad=after,comm.where=warps,combine.transport=staged,"
        "combine.column_chunks=1";
    const char* const halves =
        "fusion=pairs,backward.wgrad=after,comm.where=warps,combine.transport=staged,"
        "combine.column_chunks=2";
    EXPECT_GT(us(8, whole) - us(8, halves), 0.02 * us(8, whole));
    EXPECT_GT(us(8, whole) - us(0, whole), us(8, halves) - us(0, halves));
  }
}

// A task ends when its sums are there, so few senders of small tasks wait most of the time.
TEST(ClosedForm, SendersOfGroupsWaitForEachTask) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  LayerConfig layer{{2048, 768, 128, 8}, {}};
  const auto send = [&](int64_t groups, const char* given) {
    layer.numerics.combine_groups = groups;
    const tune::Problem problem =
        tune::make_problem({layer, 4}, tune::uniform_load(layer.shape, 4, 8192, machine, groups), machine);
    const ScheduleRequest wanted{
        .direction = Direction::kForward, .shape = layer.shape, .machine = sim::schedule_machine(machine, 4)};
    return tune::combine_part(problem, resolve(PartialSchedule::parse(given), wanted)).send;
  };
  const char* const whole = "comm.combine_sms=8,combine.column_chunks=1";
  const char* const eighths = "comm.combine_sms=8,combine.column_chunks=8";
  EXPECT_LT(send(4, whole), 0.8 * send(0, whole));
  EXPECT_GT(send(4, eighths), 2 * send(4, whole));
  EXPECT_EQ(send(0, eighths), send(0, whole));
}

TEST(ClosedForm, BackwardKnowsItsFields) {
  const sim::MachineDescription& machine = sim::shipped_machine("dgx_h100");
  const LayerShape shape{4096, 1536, 128, 8};
  const ScheduleRequest wanted{
      .direction = Direction::kBackward, .shape = shape, .machine = sim::schedule_machine(machine, 8)};
  Numerics fp32;
  fp32.weight_gradient = WeightGradient::kFloat32;
  const auto us = [&](const char* given, const Numerics& numerics = {}) {
    const tune::Problem problem = tune::make_problem({{shape, numerics}, 8, Direction::kBackward},
                                                     tune::uniform_load(shape, 8, 8192, machine), machine);
    return tune::estimate(problem, resolve(PartialSchedule::parse(given), wanted)).us;
  };
  const double usual = us("fusion=pairs");
  EXPECT_GT(us("fusion=pairs,backward.wgrad=after"), usual);
  EXPECT_GT(us("fusion=none"), us("fusion=pairs,backward.wgrad=after"));
  EXPECT_LT(us("fusion=layer"), usual);
  EXPECT_GT(us("fusion=pairs,save.xg=redispatch"), usual);
  EXPECT_GT(us("fusion=pairs", fp32), usual);
  EXPECT_GT(us("fusion=pairs,tile.dgrad_fc2.n=128"), usual);
}

TEST(ClosedForm, WithoutAGateTheFirstGemmIsHalfAsMuch) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  const LayerShape shape{2688, 1792, 128, 6};
  const auto problem = [&](const char* activation) {
    LayerConfig layer{shape, {}};
    set_activation(layer.numerics, activation);
    return tune::make_problem({layer, 8}, tune::uniform_load(shape, 8, 8192, machine), machine);
  };
  const Schedule schedule =
      fill({}, {.direction = Direction::kForward, .shape = shape, .machine = sim::schedule_machine(machine, 8)});
  const tune::Problem gated = problem("swiglu"), plain = problem("relu2");
  EXPECT_DOUBLE_EQ(tune::gemm_part(gated, schedule).first_tiles, 2 * tune::gemm_part(plain, schedule).first_tiles);
  EXPECT_LT(plain.memory.all, gated.memory.all);
  EXPECT_LT(tune::estimate(plain, schedule).us, tune::estimate(gated, schedule).us);
  EXPECT_LT(tune::lower_bound(plain).gemms, 0.7 * tune::lower_bound(gated).gemms);
}

}  // namespace
}  // namespace uniep::test
