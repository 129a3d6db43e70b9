// Group::abort() and Group::trim() on GPUs: 20 groups after each other, each ended from another thread while its
// kernels wait for a rank that does not come, while calls run, or while none does. abort() must not wait, every call
// must end long before its limit, the device's free memory must stay as it is, and all bytes be equal. Exit status 77
// without a Hopper GPU.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/runtime/driver.h"
#include "support/random_layer.h"
#include "tests/cuda/gpu_support.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::difference;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::run_layer;

constexpr double kLimitSeconds = 120, kAtOnceSeconds = 2;
constexpr std::size_t kSlackBytes = 32 << 20;  // of the driver's own

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::size_t free_bytes() {
  const ScopedDevice scope(0);
  std::size_t free = 0, total = 0;
  check(driver().cuMemGetInfo(&free, &total), "cuMemGetInfo");
  return free;
}

RandomLayer layer_of_two_ranks() {
  uniep::test::RandomLayerLimits limits;
  limits.ranks = {2};
  limits.most_local_experts = 8;
  limits.fewest_tokens = 200;
  limits.most_tokens = 300;
  limits.columns = {{512, 256}};
  return random_layer(4, limits);
}

class AbortTests {
 public:
  AbortTests(Results& results, std::vector<int> devices) : results_(results), devices_(std::move(devices)) {}

  void run() {
    std::optional<cli::LayerResult> expected;
    std::size_t free = 0;
    constexpr int kWarmUp = 3, kRounds = 20;
    for (int round = 0; round < kWarmUp + kRounds; ++round) {
      const std::string name = std::to_string(devices_.size()) + " devices, round " + std::to_string(round);
      try {
        one(name, round % 3, expected);
      } catch (const std::exception& error) {
        results_.record(name, false, error.what());
      }
      if (round == kWarmUp - 1) free = free_bytes();
    }
    const std::size_t now = free_bytes();
    results_.record("free memory after 20 aborts", now + kSlackBytes >= free,
                    std::to_string(free >> 20) + " MiB before, " + std::to_string(now >> 20) + " behind");
  }

 private:
  void one(const std::string& name, int kind, std::optional<cli::LayerResult>& expected) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = 2;
    options.devices = devices_;
    options.timeout_seconds = options.arrival_timeout_seconds = kLimitSeconds;
    Group group(options);
    const LayerConfig& config = layer_.config;
    const Schedule forward = resolve({}, {.direction = Direction::kForward,
                                          .shape = config.shape,
                                          .numerics = config.numerics,
                                          .machine = group.machine()});
    const Schedule backward = resolve({}, {.direction = Direction::kBackward,
                                           .shape = config.shape,
                                           .numerics = config.numerics,
                                           .machine = group.machine()});
    const auto layer = [&] { return run_layer(group, config, layer_.data, forward, backward); };
    const auto check_bits = [&](const char* when) {
      const cli::LayerResult result = layer();
      if (!expected) expected = result;
      const std::string other = difference(result, *expected);
      results_.record(name + when, other.empty(), other);
    };
    check_bits("");
    group.trim();
    check_bits(", after trim()");
    auto& engine = dynamic_cast<CudaEngine&>(group.implementation());
    std::string text = "none";
    std::atomic<int> calls = 0;
    std::thread caller;
    if (kind != 0) {
      if (kind == 1) engine.leave_out(1);
      caller = std::thread([&] {
        try {
          for (;; ++calls) layer();
        } catch (const Error& error) {
          text = error.what();
        }
      });
      while (kind == 2 && calls < 2) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    const auto begin = std::chrono::steady_clock::now();
    group.abort();
    const double waited = seconds_since(begin);
    if (caller.joinable()) caller.join();
    const double ended = seconds_since(begin);
    results_.record(name + ": abort() waits for nothing", waited < 1, std::to_string(waited) + " s");
    results_.record(name + ": calls end", ended < kAtOnceSeconds, std::to_string(ended) + " s: " + text);
    try {
      group.check();
      text = "none";
    } catch (const Error& error) {
      text = error.what();
    }
    results_.record(name + ": later calls", text == "group: aborted; the ranks need a new Group", text);
  }

  Results& results_;
  std::vector<int> devices_;
  const RandomLayer layer_ = layer_of_two_ranks();
};

int run(int argc, char** argv) {
  Results results;
  for (int i = 1; i < argc; ++i) results.verbose |= std::string(argv[i]) == "--verbose";
  AbortTests(results, {0, 0}).run();
  if (device_count() > 1) AbortTests(results, {0, 1}).run();
  std::printf("abort tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
