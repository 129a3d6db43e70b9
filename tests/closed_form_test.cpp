#include "tune/closed_form.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "program/schedule_space.h"
#include "support/built_program.h"
#include "support/measured_layers.h"

// The closed form against measured layers (tests/data/measured_layers.json: H200, one to eight GPUs).
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
  rows.dispatched = rows.returned = rows.sent = load.rows * 7 / 8;
  rows.dispatched_once = rows.sent_once = load.rows_once - load.rows / 8;
  return load;
}

tune::Problem problem_of(const MeasuredLayer& row) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  const RankLoad load = row.routing == "seven_eighths_remote"
                            ? remote_load(row)
                            : tune::uniform_load(row.shape, row.ranks, static_cast<double>(row.tokens), machine);
  return tune::make_problem({row.shape}, row.ranks, load, machine, row.state);
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

TEST(ClosedForm, WithoutAGateTheFirstGemmIsHalfAsMuch) {
  const sim::MachineDescription& machine = sim::shipped_machine("h200");
  const LayerShape shape{2688, 1792, 128, 6};
  const auto problem = [&](const char* activation) {
    LayerConfig layer{shape, {}};
    set_activation(layer.numerics, activation);
    return tune::make_problem(layer, 8, tune::uniform_load(shape, 8, 8192, machine), machine, tune::State::kSustained);
  };
  const Schedule schedule =
      fill({}, {.direction = Direction::kForward, .shape = shape, .machine = sim::schedule_machine(machine, 8)});
  const tune::Problem gated = problem("swiglu"), plain = problem("relu2");
  EXPECT_DOUBLE_EQ(tune::gemm_part(gated, schedule).first_cycles, 2 * tune::gemm_part(plain, schedule).first_cycles);
  EXPECT_LT(plain.memory, gated.memory);
  EXPECT_LT(tune::estimate(plain, schedule).us, tune::estimate(gated, schedule).us);
  EXPECT_LT(tune::lower_bound(plain).gemms, 0.7 * tune::lower_bound(gated).gemms);
}

}  // namespace
}  // namespace uniep::test
