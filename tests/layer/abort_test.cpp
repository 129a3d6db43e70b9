#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <thread>

#include "engine/cpu/engine.h"
#include "support/branch_counts.h"
#include "support/c_layer.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"

// Group::abort() and Group::trim() on the cpu engine.
namespace uniep::test {
namespace {

constexpr std::chrono::seconds kAtOnce{10};  // of the 300 s that a wait may take here

RandomLayer layer_of(uint64_t seed) {
  return random_layer(
      seed, {.ranks = {2}, .most_local_experts = 4, .most_tokens = 64, .columns = {{96, 80}}, .fewest_tokens = 48});
}

GroupOptions options_of(const RandomLayer& layer) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  options.workers = 2;
  options.timeout_seconds = 300;
  return options;
}

struct Runner {
  explicit Runner(const RandomLayer& given) : layer(given), group(options_of(given)) {
    const auto schedule = [&](Direction direction) {
      return resolve({}, {.direction = direction,
                          .shape = layer.config.shape,
                          .numerics = layer.config.numerics,
                          .machine = group.machine()});
    };
    forward = schedule(Direction::kForward);
    backward = schedule(Direction::kBackward);
  }
  cli::LayerResult run() { return run_layer(group, layer.config, layer.data, forward, backward); }
  cpu::CpuEngine& engine() { return dynamic_cast<cpu::CpuEngine&>(group.implementation()); }

  const RandomLayer& layer;
  Group group;
  Schedule forward, backward;
};

void expect_aborted(const std::function<void()>& call) {
  expect_error(Status::kTimeout, "group: aborted; the ranks need a new Group", call);
}

std::ptrdiff_t threads_of_this_process() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// The heap's blocks that are in use, which freed ones kept for later are not.
std::size_t heap_in_use() {
  const struct mallinfo2 now = ::mallinfo2();
  return now.uordblks + now.hblkhd;
}

TEST(Abort, EndsCallsOfOtherThreadsAndTwentyGroupsAfterEachOtherGiveTheSameBitsInTheSameMemory) {
  const RandomLayer layer = layer_of(7);
  const cli::LayerResult expected = run_sequential(layer);
  BranchCounts branches;
  Random random(11);
  std::size_t heap = 0;
  std::ptrdiff_t threads = 0;
  const auto round = [&](int number) {
    Runner run(layer);
    EXPECT_EQ(difference(run.run(), expected), "") << "round " << number;
    EXPECT_GT(run.engine().memory(0).symmetric_bytes, 0u);
    const bool waits = number % 3 == 0, idle = number % 3 == 1;
    if (waits) run.engine().plant(cpu::Fault::kSilentWorker);
    std::atomic<bool> ended = false, threw = false;
    std::atomic<int> calls = 0;
    std::thread caller;
    if (!idle) {
      caller = std::thread([&] {
        try {
          for (;; ++calls) EXPECT_EQ(difference(run.run(), expected), "");
        } catch (const Error& error) {
          EXPECT_STREQ(error.what(), "group: aborted; the ranks need a new Group");
          threw = true;
        }
        ended = true;
      });
      std::this_thread::sleep_for(std::chrono::microseconds(random.between(2000, 30000)));
      const bool behind_a_call = !waits && number % 2 == 0;
      while (behind_a_call && calls == 0 && !ended) std::this_thread::yield();
    }
    const bool inside = !idle && !ended;
    const auto begin = std::chrono::steady_clock::now();
    run.group.abort();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1)) << "abort() waited";
    run.group.abort();
    if (caller.joinable()) caller.join();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kAtOnce);
    EXPECT_EQ(threw, !idle);
    EXPECT_EQ(run.engine().memory(0).symmetric_bytes + run.engine().memory(1).symmetric_bytes, 0u);
    expect_aborted([&] { run.run(); });
    expect_aborted([&] { run.group.recover(); });
    expect_aborted([&] { run.group.check(); });
    expect_aborted([&] { run.group.synchronize(); });
    expect_aborted([&] { run.group.memory(0); });
    expect_aborted([&] { run.group.trim(); });
    expect_aborted([&] { run.group.allocate_symmetric(64); });
    run.group.leave();
    branches.count("ends a call that waits", inside && waits);
    branches.count("ends calls that run", inside && !waits);
    branches.count("some calls had ended before", calls > 0);
    branches.count("nobody inside", idle);
  };
  constexpr int kWarmUp = 3, kRounds = 20;
  for (int number = 0; number < kWarmUp + kRounds; ++number) {
    round(number);
    if (number == kWarmUp - 1) heap = heap_in_use(), threads = threads_of_this_process();
  }
  const auto growth = static_cast<std::ptrdiff_t>(heap_in_use()) - static_cast<std::ptrdiff_t>(heap);
  std::printf("%d aborts and restarts; the heap grew by %td bytes\n", kRounds, growth);
  EXPECT_LT(growth, 16 << 10);
  EXPECT_EQ(threads_of_this_process(), threads);
  branches.expect_all_taken();
}

TEST(Abort, EndsLaterWeightGradientsAndLeavesWhatWasSavedToBeDropped) {
  const RandomLayer layer = layer_of(8);
  Runner run(layer);
  LayerArrays arrays(layer);
  const Placement placement = place(run.group, layer.config.shape, arrays.routings);
  const Saved saved = forward(run.group, layer.config, run.forward, placement, arrays.forward_arguments());
  const PendingWeightGradients work = backward(run.group, layer.config, run.backward, saved,
                                               arrays.backward_arguments(WeightGradientTime::kLater, false));
  const std::vector<WeightGradientArguments> gradients = arrays.weight_gradient_arguments();
  run.group.abort();
  expect_aborted([&] { weight_gradients(run.group, work, gradients); });
  expect_aborted([&] { memory_need(run.group, layer.config, run.forward, placement); });
  EXPECT_GT(placement.padded_rows(0) + placement.padded_rows(1), 0);
}

TEST(Abort, OfCTakesNullAndEndsAllCallsOfTheHandle) {
  const RandomLayer random = layer_of(9);
  const CLayer layer(random);
  const GroupHandle group = make_group(group_options(2));
  const PlacementHandle placement = layer.place(group.get());
  layer.forward(group.get(), placement.get(), "auto");
  uniep_group_abort(nullptr);
  uniep_group_abort(group.get());
  expect_failure(UNIEP_TIMEOUT, "group: aborted; the ranks need a new Group", uniep_group_check(group.get()));
  expect_failure(UNIEP_TIMEOUT, "group: aborted; the ranks need a new Group", uniep_group_trim(group.get()));
  uniep_group_leave(group.get());
}

TEST(Trim, GivesMemoryBackAndLaterCallsGiveTheSameBits) {
  const RandomLayer layer = layer_of(10);
  const cli::LayerResult expected = run_sequential(layer);
  Runner run(layer);
  run.group.trim();
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(difference(run.run(), expected), "");
    const std::size_t held = run.group.memory(1).symmetric_bytes;
    EXPECT_GT(held, 0u);
    run.group.trim();
    EXPECT_EQ(run.group.memory(0).symmetric_bytes + run.group.memory(1).symmetric_bytes, 0u);
    EXPECT_EQ(difference(run.run(), expected), "");
    EXPECT_EQ(run.group.memory(1).symmetric_bytes, held);
  }
}

TEST(Trim, OfC) {
  const GroupHandle group = make_group(group_options(2));
  expect_ok(uniep_group_trim(group.get()));
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null pointer", uniep_group_trim(nullptr));
}

}  // namespace
}  // namespace uniep::test
