// Where a device has no memory left, the library asks the process for what it caches there and tries once more. On a
// stand-in for the CUDA driver.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "comm/symmetric_memory.h"
#include "engine/cuda/memory/block_cache.h"
#include "engine/cuda/memory/device_block.h"
#include "support/expect_error.h"
#include "support/loaded_fake_cuda.h"
#include "uniep/c_group.h"
#include "uniep/group.h"

namespace uniep::test {
namespace {

// Stands for a framework's allocator, and notes for which devices it was asked.
class Framework {
 public:
  Framework() {
    fake();
    set_memory_reclaimer([](void* own, int device) { static_cast<Framework*>(own)->asked.push_back(device); }, this);
  }
  ~Framework() {
    set_memory_reclaimer(nullptr, nullptr);
    ::unsetenv("FAKE_CUDA_FAIL");
  }
  Framework(const Framework&) = delete;
  Framework& operator=(const Framework&) = delete;

  std::vector<int> asked;
};

void fail_next(const char* plan) {
  ::unsetenv("FAKE_CUDA_FAIL");
  fake().reset();
  ::setenv("FAKE_CUDA_FAIL", plan, 1);
}

TEST(MemoryReclaimer, GivesSymmetricMemoryAndBlocksASecondAttempt) {
  Framework framework;
  fail_next("cuMemAlloc:1:2");
  const auto memory = make_local_symmetric_memory({0, 1}, 4096, 5);
  EXPECT_EQ(framework.asked, std::vector<int>{0});
  fail_next("cuMemAlloc:1:2");
  const cuda::DeviceBlock block(1, 4096, "a test");
  EXPECT_EQ(framework.asked, (std::vector<int>{0, 1}));
  fail_next("cuMemAlloc:1:999");  // not for want of memory
  expect_error(Status::kDevice, "for a test", [] { const cuda::DeviceBlock other(1, 4096, "a test"); });
  EXPECT_EQ(framework.asked.size(), 2u);
}

TEST(MemoryReclaimer, IsAskedOnceForWhatIsNotThereAnyway) {
  Framework framework;
  cuda::BlockCache cache(0, {1});
  const Allocator allocator = cache.allocator();
  EXPECT_EQ(allocator.allocate(allocator.context, std::size_t{1} << 60, 64, 0, {}), nullptr);
  EXPECT_EQ(framework.asked, std::vector<int>{1});
  fail_next("cuMemAlloc:1:2");  // what the cache itself keeps goes first
  void* const memory = allocator.allocate(allocator.context, 4096, 64, 0, {});
  EXPECT_NE(memory, nullptr);
  EXPECT_EQ(framework.asked.size(), 1u);
  allocator.release(allocator.context, memory, 4096, 0, {});
}

// As a framework's thread may that holds a lock which the reclaimer waits for.
TEST(MemoryReclaimer, AnotherThreadMayGiveABlockBackMeanwhile) {
  fake();
  struct Given {
    cuda::BlockCache cache{0, {0}};
    Allocator allocator = cache.allocator();
    void* block = allocator.allocate(allocator.context, 4096, 64, 0, {});
    std::thread other;
    std::atomic<bool> over = false;
    bool in_time = false;
  } given;
  const auto give_back = [](void* context, int) {
    auto& own = *static_cast<Given*>(context);
    own.other = std::thread([&own] {
      own.allocator.release(own.allocator.context, own.block, 4096, 0, {});
      own.over = true;
    });
    for (int i = 0; i < 5000 && !own.over; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    own.in_time = own.over;
  };
  set_memory_reclaimer(give_back, &given);
  fail_next("cuMemAlloc:1-2:2");
  EXPECT_EQ(given.allocator.allocate(given.allocator.context, 4096, 64, 0, {}), given.block);
  set_memory_reclaimer(nullptr, nullptr);
  ::unsetenv("FAKE_CUDA_FAIL");
  given.other.join();
  EXPECT_TRUE(given.in_time);
  given.allocator.release(given.allocator.context, given.block, 4096, 0, {});
}

TEST(MemoryReclaimer, IsNobodyWhereNoneIsSet) {
  { const Framework gone; }
  fail_next("cuMemAlloc:1:2");
  expect_error(Status::kOutOfMemory, "for a test", [] { const cuda::DeviceBlock block(0, 4096, "a test"); });
  int asked = 0;
  uniep_set_memory_reclaimer([](void* count, int32_t) { ++*static_cast<int*>(count); }, &asked);
  fail_next("cuMemAlloc:1:2");
  const cuda::DeviceBlock block(0, 4096, "a test");
  uniep_set_memory_reclaimer(nullptr, nullptr);
  ::unsetenv("FAKE_CUDA_FAIL");
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace uniep::test
