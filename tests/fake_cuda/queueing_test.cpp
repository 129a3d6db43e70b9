// Several groups of one process on a stand-in for the CUDA driver: calls queue one after the other, and one that waits
// for its turn ends when its group is aborted.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/layer_arrays.h"
#include "support/loaded_fake_cuda.h"
#include "support/processes.h"
#include "uniep/layer.h"

namespace uniep::test {
namespace {

using std::chrono::milliseconds;

template <typename Over>
bool comes_in_time(const Over& over) {
  const double end = monotonic_seconds() + 5 * kSlackSeconds;
  while (!over() && monotonic_seconds() < end) std::this_thread::sleep_for(milliseconds(1));
  return over();
}

// The C++ heap, which keeps a call waiting inside of the library.
struct SlowHeap {
  std::atomic<bool> slow = false, reached = false;

  Allocator allocator() {
    const auto allocate = [](void* context, std::size_t bytes, std::size_t alignment, int, Stream) {
      auto& own = *static_cast<SlowHeap*>(context);
      own.reached = own.slow.load();
      while (own.slow) std::this_thread::sleep_for(milliseconds(1));
      return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    return {allocate, [](void*, void* memory, std::size_t, int, Stream) { std::free(memory); }, this};
  }
};

// A group of two ranks on one device, and its forwards.
class QueuedLayer {
 public:
  explicit QueuedLayer(const Allocator& allocator = {}) : group_(options_with(allocator)) { set_hidden(64); }

  Group& group() { return group_; }
  // What forward() gives behind it needs more symmetric memory.
  void set_hidden(int64_t hidden) {
    layer_.config.shape.hidden = hidden;
    const LayerConfig& config = layer_.config;
    schedule_ = resolve({}, {.direction = Direction::kForward,
                             .shape = config.shape,
                             .numerics = config.numerics,
                             .machine = group_.machine()});
    placement_ = place(group_, config.shape, arrays_.routings, {4096, 128});
  }
  std::string forward() {
    try {
      uniep::forward(group_, layer_.config, schedule_, placement_, arguments_);
      return "none";
    } catch (const Error& error) {
      return std::string(status_name(error.status())) + ": " + error.what();
    }
  }

 private:
  static GroupOptions options_with(const Allocator& allocator) {
    fake();
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = 2;
    options.devices = {0};
    options.allocator = allocator;
    return options;
  }

  RandomLayer layer_ = random_layer(
      5, {.ranks = {2}, .most_local_experts = 3, .most_tokens = 40, .columns = {{64, 32}}, .fewest_tokens = 40});
  LayerArrays arrays_{layer_};
  Group group_;
  Schedule schedule_;
  Placement placement_;
  std::vector<ForwardArguments> arguments_ = arrays_.forward_arguments();
};

TEST(Queueing, AnAbortEndsACallThatWaitsForItsTurn) {
  SlowHeap heap;
  QueuedLayer first(heap.allocator()), second;
  heap.slow = true;
  std::string of_first, of_second;
  std::atomic<bool> over = false;
  std::thread inside([&] { of_first = first.forward(); });
  EXPECT_TRUE(comes_in_time([&] { return heap.reached.load(); }));
  std::thread waits([&] {
    of_second = second.forward();
    over = true;
  });
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_FALSE(over);
  second.group().abort();
  EXPECT_TRUE(comes_in_time([&] { return over.load(); }));
  heap.slow = false;
  inside.join();
  waits.join();
  EXPECT_EQ(of_first, "none");
  EXPECT_NE(of_second.find("group: aborted"), std::string::npos) << of_second;
}

// As a binding's garbage collector may that runs where a framework is asked for memory.
TEST(Queueing, AGroupMayEndInsideOfAnothersCall) {
  for (const bool aborted : {false, true}) {
    QueuedLayer first;
    EXPECT_EQ(first.forward(), "none");
    auto second = std::make_unique<QueuedLayer>();
    EXPECT_EQ(second->forward(), "none");
    if (aborted) second->group().abort();
    set_memory_reclaimer([](void* of_test, int) { static_cast<std::unique_ptr<QueuedLayer>*>(of_test)->reset(); },
                         &second);
    ::setenv("FAKE_CUDA_FAIL", "cuMemAlloc:+1-2:2", 1);
    std::string end;
    std::atomic<bool> over = false;
    std::thread calls([&] {
      first.set_hidden(512);
      end = first.forward();
      over = true;
    });
    if (!comes_in_time([&] { return over.load(); })) {
      std::fprintf(stderr, "the call waits for itself\n");
      std::abort();
    }
    calls.join();
    ::unsetenv("FAKE_CUDA_FAIL");
    set_memory_reclaimer(nullptr, nullptr);
    EXPECT_EQ(end, "none");
    EXPECT_EQ(second, nullptr);
  }
}

// Under ThreadSanitizer: what ends the group looks at nothing that the call replaces.
TEST(Queueing, AnAbortWhileSymmetricMemoryGrows) {
  for (int round = 0; round < 8; ++round) {
    QueuedLayer layer;
    EXPECT_EQ(layer.forward(), "none");
    layer.set_hidden(64 << (1 + round % 3));
    std::string end;
    std::thread grows([&] { end = layer.forward(); });
    std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
    layer.group().abort();
    grows.join();
    EXPECT_TRUE(end == "none" || end.find("group: aborted") != std::string::npos) << end;
  }
}

}  // namespace
}  // namespace uniep::test
