// What checks of candidates cost a job's tuner.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "support/made_up_job.h"
#include "uniep/error.h"
#include "uniep/tuner.h"

namespace uniep::test {
namespace {

TEST(TunerCheckCost, AFailedCheckCostsItsTime) {
  MadeUpJob job;
  job.factors = {1, 0.5};
  job.steps = 3;
  TunerOptions options = job_options(job, 0, nullptr);
  options.check = [](int, Direction, const Schedule&, const Schedule&) -> TunerCheck {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    throw Error(Status::kTimeout, "rank 1 waits for rank 0");
  };
  Tuner tuner(options);
  tuner.measured(tuner.schedule(0, Direction::kForward), {10});
  tuner.begin_round();
  EXPECT_GE(tuner.spent().lost_milliseconds, 20);
}

// It brings the inputs to the device: what it took says nothing about the next ones.
TEST(TunerCheckCost, ALongFirstCheckDelaysNoMoreThanItCost) {
  MadeUpJob job;
  job.factors = std::vector<double>(12, 1.03);
  job.factors[0] = 1;
  job.batch = 2;
  TunerOptions options = job_options(job, 0, nullptr);
  options.budget = 0.01;
  bool is_first = true;
  options.check = [&is_first](int, Direction, const Schedule&, const Schedule&) -> TunerCheck {
    return {true, std::exchange(is_first, false) ? 101.0 : 1.0, ""};
  };
  Tuner tuner(options);
  double second_round = 0;
  for (int step = 0; step < 200 && second_round == 0; ++step) {
    for (int call = 0; call < 20; ++call) {
      const TunerCall planned = tuner.schedule(0, Direction::kForward);
      tuner.measured(planned, {10 * job.factors[static_cast<std::size_t>(job_number(planned.schedule))]});
    }
    tuner.step();
    if (!tuner.wants_round()) continue;
    const double layers = tuner.spent().layers_milliseconds;
    tuner.begin_round();
    if (step > 0) second_round = layers;
  }
  const double lost = tuner.spent().lost_milliseconds;
  EXPECT_GT(lost, 102);
  EXPECT_GT(second_round, 102 / options.budget);
  EXPECT_LT(second_round, 1.3 * lost / options.budget) << lost;
}

}  // namespace
}  // namespace uniep::test
