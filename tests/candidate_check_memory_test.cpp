// Checks of a training's candidates while memory runs out, at each request in turn.
#include <gtest/gtest.h>

#include <string>

#include "support/failing_heap.h"
#include "train/candidate_check.h"

namespace uniep::test {
namespace {

TEST(CandidateCheckMemory, RunsOutAndTheCandidateIsRefusedForNow) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 2;
  options.workers = 2;
  LayerConfig layer;
  layer.shape = {64, 32, 8, 2};
  int64_t refused = 0, of_heap = 0;
  for (int64_t n = 1;; ++n) {
    Group group(options);
    const auto schedule = [&](Direction direction, const char* text) {
      return resolve(
          PartialSchedule::parse(text),
          {.direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = group.machine()});
    };
    const Schedule forward = schedule(Direction::kForward, "fusion=none");
    const Schedule backward = schedule(Direction::kBackward, "fusion=none");
    const Schedule candidate = schedule(Direction::kBackward, "fusion=layer");
    train::CandidateCheck check(group, layer, 8 * 24, nullptr);
    heap_failed = false;
    heap_countdown = n;
    std::string error;
    TunerCheck found;
    try {
      found = check.check(Direction::kBackward, candidate, forward, backward);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    heap_countdown = 0;
    ASSERT_EQ(error, "") << "request " << n;
    if (!heap_failed) {
      EXPECT_TRUE(found.equal);
      break;
    }
    // The engine may have gone on without it.
    EXPECT_TRUE(found.refused.empty() ? found.equal : found.refused.starts_with("no room to check it"))
        << n << ": " << found.refused;
    refused += !found.refused.empty();
    of_heap += found.refused == "no room to check it";
    // Memory is there again: nothing half made is left behind, and the group takes calls.
    EXPECT_EQ(check.check(Direction::kBackward, candidate, forward, backward).refused, "") << "after request " << n;
    EXPECT_TRUE(check.check(Direction::kForward, forward, forward, backward).equal) << "after request " << n;
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(refused, 50);
  EXPECT_GT(of_heap, 5);
  EXPECT_GT(refused - of_heap, 5);  // the engine's own
}

}  // namespace
}  // namespace uniep::test
