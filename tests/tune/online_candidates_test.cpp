// What a Tuner tries of itself, and how long it expects calls to take.
#include "tune/online_candidates.h"

#include <gtest/gtest.h>

#include "support/branch_counts.h"
#include "support/random_schedule_case.h"
#include "tune/closed_form.h"
#include "tune/forecast.h"
#include "tune/neighbours.h"
#include "tune/solve.h"
#include "uniep/tuner.h"

namespace uniep::test {
namespace {

// What the library itself tries: legal, other than the incumbent, keeping what is fixed.
TEST(OnlineCandidates, AreLegalDistinctAndKeepWhatIsFixed) {
  BranchCounts branches;
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      ScheduleCase where;
      where.direction = direction;
      where.shape = {2048, 768, 128, 8};
      where.machine = engine == EngineKind::kCpu ? Machine{engine, 4, 8} : Machine{engine, 8, 132};
      TunerLayer layer;
      layer.config = {where.shape, where.numerics};
      layer.tokens = 4096;
      layer.forward = where.filled();
      const PartialSchedule fixed = PartialSchedule::parse("queue=dynamic");
      const Schedule incumbent = where.filled(fixed);
      (direction == Direction::kForward ? layer.fixed_forward : layer.fixed_backward) = fixed;
      const std::vector<Schedule> all =
          tune::online_candidates(layer, direction, where.machine, incumbent, sim::shipped_machine("h200"));
      EXPECT_EQ(all, tune::online_candidates(layer, direction, where.machine, incumbent, sim::shipped_machine("h200")));
      EXPECT_GT(all.size(), 8u);
      for (const Schedule& schedule : all) {
        EXPECT_TRUE(where.violations(schedule).empty()) << to_text(schedule);
        EXPECT_EQ(schedule.queue, QueueKind::kDynamic);
        EXPECT_EQ(schedule.save_xg, incumbent.save_xg);
        EXPECT_EQ(schedule.save_z, incumbent.save_z);
        EXPECT_EQ(schedule.comm.reserve_sms, incumbent.comm.reserve_sms);
        EXPECT_EQ(schedule.comm.lend_sms, incumbent.comm.lend_sms);
        EXPECT_NE(schedule, incumbent);
      }
      // What the closed form says is far behind.
      int behind = 0;
      if (engine == EngineKind::kCuda && direction == Direction::kForward) {
        const sim::MachineDescription& machine = sim::shipped_machine(sim::kDefaultMachine);
        const tune::Problem problem = tune::make_problem({{where.shape, where.numerics}, 8},
                                                         tune::uniform_load(where.shape, 8, 4096, machine), machine);
        const double most = 1.05 * tune::estimate(problem, incumbent).us;
        for (const Schedule& schedule : tune::neighbours(
                 incumbent, fixed,
                 {.direction = direction, .shape = where.shape, .numerics = where.numerics, .machine = where.machine},
                 64)) {
          if (tune::estimate(problem, schedule).us <= most) continue;
          ++behind;
          EXPECT_EQ(std::find(all.begin(), all.end(), schedule), all.end()) << to_text(schedule);
        }
      }
      EXPECT_TRUE(tune::is_proven(layer, direction, where.machine, all.front()));
      branches.count("cpu", engine == EngineKind::kCpu);
      branches.count("cuda: some are predicted to be far behind", behind > 0);
    }
  }
  branches.expect_all_taken();
}

// A forecast is of what the closed form says of the layer's groups, under any load.
TEST(Forecast, KnowsGroupsOfSums) {
  const sim::MachineDescription& machine = sim::shipped_machine(sim::kDefaultMachine);
  const Machine cuda{EngineKind::kCuda, 8, 132};
  LayerConfig config{{2048, 768, 128, 8}, {}};
  config.numerics.combine_groups = 8;
  const Schedule schedule = resolve(
      {}, {.direction = Direction::kForward, .shape = config.shape, .numerics = config.numerics, .machine = cuda});
  const auto us = [&](double tokens) {
    return tune::estimate(
               tune::make_problem({config, 8}, tune::uniform_load(config.shape, 8, tokens, machine, 8), machine),
               schedule)
        .us;
  };
  const tune::Forecast forecast(config, cuda, schedule, 4096);
  EXPECT_DOUBLE_EQ(forecast.of(0, 0), us(4096));
  EXPECT_NEAR(forecast.of(16 * 4096, 16 * 4096), us(8192), 0.01 * us(8192));
}

// Of groups of sums it tries the solver's, too, and nothing that is predicted to be far behind.
TEST(OnlineCandidates, KnowGroupsOfSums) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    ScheduleCase where;
    where.direction = direction;
    where.shape = {2048, 768, 128, 8};
    where.machine = {EngineKind::kCuda, 8, 132};
    where.numerics.combine_groups = 16;
    TunerLayer layer;
    layer.config = {where.shape, where.numerics};
    layer.tokens = 4096;
    layer.forward = where.filled();
    const Schedule incumbent = where.filled();
    const std::vector<Schedule> all = tune::online_candidates(layer, direction, where.machine, incumbent, machine);
    const std::vector<Schedule> near = tune::neighbours(
        incumbent, {},
        {.direction = direction, .shape = where.shape, .numerics = where.numerics, .machine = where.machine}, 500);
    const tune::Problem problem = tune::make_problem({layer.config, 8, direction},
                                                     tune::uniform_load(where.shape, 8, 4096, machine, 16), machine);
    int far = 0;
    for (const Schedule& schedule : all) {
      EXPECT_TRUE(where.violations(schedule).empty()) << to_text(schedule);
      EXPECT_LE(tune::estimate(problem, schedule).us, 1.05 * tune::estimate(problem, incumbent).us);
      far += std::find(near.begin(), near.end(), schedule) == near.end();
    }
    EXPECT_GT(far, 4);
    EXPECT_GT(all.size(), 8u);
    tune::SolveRequest request;
    request.shape = where.shape;
    request.numerics = where.numerics;
    request.direction = direction;
    request.ranks = 8;
    request.machine = &machine;
    request.loads = {tune::uniform_load(where.shape, 8, 4096, machine, 16)};
    std::vector<Schedule> solved;  // those near enough
    for (const tune::Ranked& ranked : tune::solve(request).best) {
      if (ranked.schedule == incumbent) continue;
      if (ranked.us <= 1.05 * tune::estimate(problem, incumbent).us) solved.push_back(ranked.schedule);
    }
    EXPECT_GT(solved.size(), 4u);
    for (std::size_t i = 0; i < solved.size(); ++i) EXPECT_EQ(all[i], solved[i]) << i;
  }
}

}  // namespace
}  // namespace uniep::test
