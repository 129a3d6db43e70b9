#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "support/layer_arrays.h"
#include "support/processes.h"

// A forked child has the cpu engine's memory and none of its threads.
namespace uniep::test {
namespace {

class ForkedChild : public ::testing::Test {
 protected:
  ForkedChild() {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = 2;
    options.workers = 2;
    group = std::make_unique<Group>(options);
    placement = place(*group, layer.config.shape, arrays.routings);
    saved = forward();
    const auto arguments = arrays.backward_arguments(WeightGradientTime::kLater, false);
    work = backward(*group, layer.config, schedule(Direction::kBackward), saved, arguments);
  }
  Schedule schedule(Direction direction) const {
    return resolve({}, {.direction = direction,
                        .shape = layer.config.shape,
                        .numerics = layer.config.numerics,
                        .machine = group->machine()});
  }
  Saved forward() {
    return uniep::forward(*group, layer.config, schedule(Direction::kForward), placement, arrays.forward_arguments());
  }

  const RandomLayer layer = random_layer(95, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8});
  LayerArrays arrays{layer};
  std::unique_ptr<Group> group;
  Placement placement;
  Saved saved;
  PendingWeightGradients work;
};

TEST_F(ForkedChild, EndsItsCopyOfAGroupWithoutAWait) {
  Process child([&](const Reporter& reporter) {
    work = {};
    saved = {};
    group.reset();
    reporter.line("ended");
  });
  EXPECT_EQ(child.line(5), "ended");
  forward();  // the parent's threads are there
}

TEST_F(ForkedChild, MakesNoCallOnIt) {
  Process child([&](const Reporter& reporter) {
    for (int again = 0; again < 2; ++again) reporter.line(reporter.error_of([&] { forward(); }));
    reporter.line(reporter.error_of([&] { weight_gradients(*group, work, arrays.weight_gradient_arguments()); }));
    work = {};
    saved = {};
    group.reset();
    reporter.line("ended");
  });
  const std::string expected = "invalid argument: group: of process " + std::to_string(::getpid()) +
                               ", and used in its forked child " + std::to_string(child.id()) + "; make a Group there";
  for (int call = 0; call < 3; ++call) EXPECT_EQ(child.line(5), expected);
  EXPECT_EQ(child.line(5), "ended");
  weight_gradients(*group, work, arrays.weight_gradient_arguments());
}

TEST_F(ForkedChild, MakesAGroupOfItsOwn) {
  Process child([&](const Reporter& reporter) {
    work = {};
    saved = {};
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = 2;
    options.workers = 2;
    group = std::make_unique<Group>(options);  // ends the copy
    reporter.line(reporter.error_of([&] { forward(); }));
  });
  EXPECT_EQ(child.line(20), "none");
}

}  // namespace
}  // namespace uniep::test
