// What a group keeps of the memory that it takes from its GPUs, on a stand-in for the CUDA driver.
#include "engine/cuda/memory/block_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "support/branch_counts.h"
#include "support/fake_cuda.h"
#include "support/loaded_fake_cuda.h"
#include "support/random_layer.h"

namespace uniep::test {
namespace {

TEST(BlockCache, KeepsAtMostTwiceWhatWasHandedOutAtOneTime) {
  fake();
  cuda::BlockCache cache(0, {0});
  const Allocator allocator = cache.allocator();
  BranchCounts branches;
  Random random(3);
  std::vector<std::pair<void*, std::size_t>> held;
  std::size_t out = 0, most = 0;
  for (int i = 0; i < 4000; ++i) {
    const bool give_back = !held.empty() && (random.one_in(2) || held.size() > 12);
    const std::size_t before = cache.bytes(0);
    if (give_back) {
      const auto at = held.begin() + random.between(0, static_cast<int64_t>(held.size()) - 1);
      out -= at->second;
      allocator.release(allocator.context, at->first, 0, 0, {});
      held.erase(at);
      EXPECT_EQ(cache.bytes(0), before);
    } else {
      const auto bytes = static_cast<std::size_t>(random.between(1, 1 << random.between(10, 24)));
      held.emplace_back(allocator.allocate(allocator.context, bytes, 64, 0, {}), bytes);
      out += bytes;
    }
    most = std::max(most, out);
    const std::size_t now = cache.bytes(0);
    // A block may be an eighth and a step or two larger than what was asked for.
    EXPECT_LE(now, 2 * (most + most / 7 + 13 * (256 << 10)));
    branches.count("a block is used again", !give_back && now == before);
    branches.count("one is taken", now > before);
    branches.count("kept ones go", now < before);
  }
  for (const auto& [memory, bytes] : held) allocator.release(allocator.context, memory, bytes, 0, {});
  cache.trim();
  EXPECT_EQ(cache.bytes(0), 0u);
  branches.expect_all_taken();
}

// To free a block waits for all work of the device, and so do batches of other sizes in each step free none for long.
TEST(BlockCache, SizesThatVaryByStepTakeNothingInTheEnd) {
  fake();
  cuda::BlockCache cache(0, {0});
  const Allocator allocator = cache.allocator();
  Random random(3);
  int changes = 0;
  for (int step = 0; step < 400; ++step) {
    const int64_t tokens = random.between(4096, 8192);
    std::vector<void*> held;
    for (int block = 0; block < 3 * 24; ++block) {
      const auto bytes = static_cast<std::size_t>(tokens * random.between(95, 105) * (block % 3 + 1));
      const std::size_t before = cache.bytes(0);
      held.push_back(allocator.allocate(allocator.context, bytes, 64, 0, {}));
      changes += step >= 200 && cache.bytes(0) != before ? 1 : 0;
    }
    for (void* memory : held) allocator.release(allocator.context, memory, 0, 0, {});
  }
  EXPECT_LE(changes, 20);  // of 14,400
}

// To free a block waits for all work of the device, so a call that repeats frees none, whatever a graph has.
TEST(BlockCache, CapturedCallsTakeNothingFromThoseThatRepeat) {
  fake();
  cuda::BlockCache cache(0, {0});
  const Allocator allocator = cache.allocator(), of_one = cache.allocator_of_one();
  constexpr std::size_t kMiB = 1 << 20;
  std::set<void*> used;
  const auto call = [&](const Allocator& workspaces) {
    for (const std::size_t bytes : {100 * kMiB, 70 * kMiB, 40 * kMiB}) {  // forward's, backward's, dispatch's
      void* const saved = allocator.allocate(allocator.context, 30 * kMiB, 64, 0, {});
      void* const workspace = workspaces.allocate(workspaces.context, bytes, 64, 0, {});
      used.insert({saved, workspace});
      workspaces.release(workspaces.context, workspace, bytes, 0, {});
      allocator.release(allocator.context, saved, 30 * kMiB, 0, {});
    }
  };
  call(allocator);
  const std::set<void*> first = used;
  const std::size_t bytes = cache.bytes(0);
  for (const uint64_t capture : {1, 2, 3}) {
    cache.set_capture(capture);
    used.clear();
    call(of_one);
    void* const saved = allocator.allocate(allocator.context, 50 * kMiB, 64, 0, {});
    used.insert(saved);
    for (void* block : used) EXPECT_EQ(first.count(block), 0u);
    cache.set_capture(0);
    allocator.release(allocator.context, saved, 50 * kMiB, 0, {});  // a Saved that is dropped behind the capture
    EXPECT_GE(cache.bytes(0), bytes + capture * 290 * kMiB);
    const std::size_t with_graphs = cache.bytes(0);
    used.clear();
    for (int i = 0; i < 3; ++i) call(allocator);
    EXPECT_EQ(used, first);
    EXPECT_EQ(used.count(saved), 0u);
    EXPECT_EQ(cache.bytes(0), with_graphs);
  }
  cache.trim();
  EXPECT_GE(cache.bytes(0), 3 * 290 * kMiB);  // replays use it
}

TEST(BlockCache, TakesBlocksBackOnAnyThread) {
  fake();
  cuda::BlockCache cache(0, {0});
  const Allocator allocator = cache.allocator();
  constexpr int kBlocks = 64, kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2; ++thread) {
      std::vector<void*> blocks;
      for (int i = 0; i < kBlocks / 2; ++i) {  // while the other thread gives its own back
        blocks.push_back(allocator.allocate(allocator.context, static_cast<std::size_t>(1000 * (i + 1)), 64, 0, {}));
      }
      threads.emplace_back([&allocator, blocks] {
        for (void* block : blocks) allocator.release(allocator.context, block, 0, 0, {});
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_GT(cache.bytes(0), 0u);
  EXPECT_LE(cache.bytes(0), 2 * kBlocks * std::size_t{64 << 10});
  cache.trim();
  EXPECT_EQ(cache.bytes(0), 0u);
}

}  // namespace
}  // namespace uniep::test
