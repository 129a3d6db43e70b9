// What `uniep tune` hears of kernels that spill registers, on a stand-in for the CUDA driver.
#include <gtest/gtest.h>

#include "cli/tune_trial.h"
#include "support/layer_arrays.h"
#include "support/loaded_fake_cuda.h"

namespace uniep::test {
namespace {

TEST(SpilledRegisters, AreToldOfTheScheduleWhoseKernelsHaveThem) {
  fake();
  const RandomLayer layer = random_layer(
      5, {.ranks = {2}, .most_local_experts = 3, .most_tokens = 40, .columns = {{64, 32}}, .fewest_tokens = 40});
  GroupOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = layer.ranks;
  options.devices = {0, 1};
  Group group(options);
  group.trim();  // modules are the process's
  cli::LayerRunner runner(group, layer.config, layer.data);
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const auto resolved = [&](const char* given, Direction of) {
      return resolve(PartialSchedule::parse(given), {.direction = of,
                                                     .shape = layer.config.shape,
                                                     .numerics = layer.config.numerics,
                                                     .machine = group.machine()});
    };
    const Schedule common = resolved("", direction);
    const Schedule rare = resolved("tile.cluster=1,tile.stages=3", direction);
    cli::LayerTrial trial(group, runner, direction, resolved("", Direction::kForward), sim::State::kSustained);
    fake().spill(0);
    trial.checksum(common);
    EXPECT_EQ(trial.spilled_bytes(rare), 0) << "none of its kernels was looked up";
    fake().spill(24);
    trial.checksum(rare);
    EXPECT_EQ(trial.spilled_bytes(rare), 24);
    EXPECT_EQ(trial.spilled_bytes(common), 0);
    fake().spill(0);
  }
}

}  // namespace
}  // namespace uniep::test
