// Checks of a training's candidates while memory runs out, at each request in turn.
#include <gtest/gtest.h>

#include <string>

#include "support/checked_layer.h"
#include "support/failing_heap.h"

namespace uniep::test {
namespace {

TEST(CandidateCheckMemory, RunsOutAndTheCandidateIsRefusedForNow) {
  int64_t refused = 0, of_heap = 0;
  for (int64_t n = 1;; ++n) {
    CheckedLayer own;
    heap_failed = false;
    heap_countdown = n;
    std::string error;
    TunerCheck found;
    try {
      found = own.check.check(Direction::kBackward, own.candidate, own.forward, own.backward);
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
    EXPECT_EQ(own.check.check(Direction::kBackward, own.candidate, own.forward, own.backward).refused, "")
        << "after request " << n;
    EXPECT_TRUE(own.check.check(Direction::kForward, own.forward, own.forward, own.backward).equal)
        << "after request " << n;
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(refused, 50);
  EXPECT_GT(of_heap, 5);
  EXPECT_GT(refused - of_heap, 5);  // the engine's own
}

}  // namespace
}  // namespace uniep::test
