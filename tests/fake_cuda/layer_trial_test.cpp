// How `uniep tune` times Schedules, and what it hears of kernels that spill registers, on a stand-in for the CUDA
// driver, on which each call takes a tenth of a millisecond.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "cli/tune_trial.h"
#include "support/layer_arrays.h"
#include "support/loaded_fake_cuda.h"

namespace uniep::test {
namespace {

class LayerTrials : public testing::TestWithParam<Direction> {
 protected:
  LayerTrials() {
    fake();
    options_.engine = EngineKind::kCuda;
    options_.ranks = layer_.ranks;
    options_.devices = {0, 1};
    group_.emplace(options_);
    runner_.emplace(*group_, layer_.config, layer_.data);
  }
  Schedule resolved(const char* given, Direction direction) {
    return resolve(PartialSchedule::parse(given), {.direction = direction,
                                                   .shape = layer_.config.shape,
                                                   .numerics = layer_.config.numerics,
                                                   .machine = group_->machine()});
  }
  // A default, and Schedules that differ from it in what needs no other kernel.
  std::vector<Schedule> schedules(int count) {
    std::vector<Schedule> all;
    for (int i = 0; i < count; ++i) {
      all.push_back(resolved(("order.raster=" + std::to_string(1 + i % 16)).c_str(), GetParam()));
    }
    return all;
  }
  cli::LayerTrial trial(sim::State state) {
    return {*group_, *runner_, GetParam(), resolved("", Direction::kForward), state};
  }

  RandomLayer layer_ = random_layer(
      5, {.ranks = {2}, .most_local_experts = 3, .most_tokens = 40, .columns = {{64, 32}}, .fewest_tokens = 40});
  GroupOptions options_;
  std::optional<Group> group_;
  std::optional<cli::LayerRunner> runner_;
};

TEST_P(LayerTrials, QueueCallsBehindOneThatDoesNotCount) {
  cli::LayerTrial sustained = trial(sim::State::kSustained), paused = trial(sim::State::kPaused);
  const std::vector<Schedule> few = schedules(3), many = schedules(20);
  sustained.checksum(few.front());
  EXPECT_TRUE(sustained.queues_calls());
  EXPECT_FALSE(paused.queues_calls());
  fake().reset();
  paused.milliseconds(few.front());
  const int one = fake().launches("uniep_begin_call");
  ASSERT_GT(one, 0);
  for (const std::vector<Schedule>& all : {few, many}) {
    fake().reset();
    const std::vector<double> times = sustained.milliseconds_in_turn(all);
    EXPECT_EQ(times.size(), all.size());
    for (const double ms : times) EXPECT_FLOAT_EQ(static_cast<float>(ms), 0.1F);
    const std::ptrdiff_t batches = (std::ssize(all) + 15) / 16;
    EXPECT_EQ(fake().launches("uniep_begin_call"), (std::ssize(all) + batches) * one);
  }
}

TEST_P(LayerTrials, TellOfACallThatFailsAndGoOn) {
  cli::LayerTrial sustained = trial(sim::State::kSustained);
  const std::vector<Schedule> few = schedules(3);
  sustained.checksum(few.front());
  fake().fail_call();
  EXPECT_THROW(sustained.milliseconds_in_turn(few), Error);
  sustained.recover();
  EXPECT_EQ(sustained.milliseconds_in_turn(few).size(), 3u);
}

TEST_P(LayerTrials, KnowTheScheduleWhoseKernelsSpill) {
  group_->trim();  // modules are the process's
  cli::LayerTrial sustained = trial(sim::State::kSustained);
  const Schedule common = resolved("", GetParam());
  const Schedule rare = resolved("tile.cluster=1,tile.stages=3", GetParam());
  fake().spill(0);
  sustained.checksum(common);
  EXPECT_EQ(sustained.spilled_bytes(rare), 0) << "none of its kernels was looked up";
  fake().spill(24);
  sustained.checksum(rare);
  fake().spill(0);
  EXPECT_EQ(sustained.spilled_bytes(rare), 24);
  EXPECT_EQ(sustained.spilled_bytes(common), 0);
}

INSTANTIATE_TEST_SUITE_P(Directions, LayerTrials, testing::Values(Direction::kForward, Direction::kBackward));

}  // namespace
}  // namespace uniep::test
