#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "cli/layer_runner.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"
#include "uniep/call_timer.h"
#include "uniep/verifier.h"

// What a group made is refused by another one, also by one that has its address.
namespace uniep::test {
namespace {

GroupOptions owner_options(int ranks) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = ranks;
  options.workers = 2;
  return options;
}

Schedule owner_schedule(const Group& group, const LayerConfig& config, Direction direction) {
  return resolve(
      {}, {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = group.machine()});
}

TEST(Owner, ATimerOfAGroupThatIsGoneIsOfNoOther) {
  const RandomLayer layer = random_layer(20, {.ranks = {2}, .fewest_tokens = 24});
  int same = 0;
  for (int i = 0; i < 10; ++i) {
    auto gone = std::make_unique<Group>(owner_options(1));
    CallTimer timer(*gone);
    const void* const address = &gone->implementation();
    gone.reset();
    Group group(owner_options(2));
    same += address == &group.implementation() ? 1 : 0;
    cli::LayerRunner runner(group, layer.config, layer.data);
    expect_error(Status::kInvalidArgument, "timer: of another group",
                 [&] { runner.forward(owner_schedule(group, layer.config, Direction::kForward), nullptr, &timer); });
    EXPECT_FALSE(timer.is_over());
  }
  std::printf("%d of 10 groups had the address of the one before\n", same);
}

class OwnerOfSaved : public ::testing::Test {
 protected:
  OwnerOfSaved() : placement(place(group, config.shape, arrays.routings)) {
    saved = forward(group, config, owner_schedule(group, config, Direction::kForward), placement,
                    arrays.forward_arguments());
  }

  const RandomLayer layer = random_layer(95, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8});
  const LayerConfig& config = layer.config;
  LayerArrays arrays{layer};
  Group group{owner_options(2)}, other{owner_options(2)};
  Placement placement;
  Saved saved;
};

TEST_F(OwnerOfSaved, AnotherGroupsBackwardRefusesIt) {
  const auto arguments = arrays.backward_arguments(WeightGradientTime::kNow, true);
  const Schedule schedule = owner_schedule(group, config, Direction::kBackward);
  expect_error(Status::kInvalidArgument, "saved: of another group",
               [&] { backward(other, config, schedule, saved, arguments); });
  std::vector<MemoryNeed> needs =
      memory_need(group, config, owner_schedule(group, config, Direction::kForward), placement);
  std::vector<std::unique_ptr<std::byte[]>> blocks;
  std::vector<CallerMemory> memory;
  for (const MemoryNeed& need : needs) {
    blocks.push_back(std::make_unique<std::byte[]>(need.saved_bytes + kMemoryAlignment));
    std::byte* data = blocks.back().get();
    while (reinterpret_cast<std::uintptr_t>(data) % kMemoryAlignment != 0) ++data;
    memory.push_back({data, need.saved_bytes});
  }
  const Saved attached =
      attach_saved(group, config, owner_schedule(group, config, Direction::kForward), placement, memory);
  expect_error(Status::kInvalidArgument, "saved: of another group",
               [&] { backward(other, config, schedule, attached, arguments); });
  backward(group, config, schedule, attached, arrays.backward_arguments(WeightGradientTime::kNow, false));
  backward(group, config, schedule, saved, arguments);
}

TEST_F(OwnerOfSaved, AnotherGroupsVerifierRefusesIt) {
  Verifier verifier(other, {.every = 1, .budget = 1});
  const auto arguments = arrays.forward_arguments();
  expect_error(Status::kInvalidArgument, "saved: of another group", [&] {
    verifier.after_forward({"layer", config, owner_schedule(group, config, Direction::kForward), arrays.routings},
                           arguments, saved);
  });
}

}  // namespace
}  // namespace uniep::test
