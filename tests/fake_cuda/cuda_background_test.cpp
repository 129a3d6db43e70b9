// Kernels that are compiled in the background, by a stand-in for NVRTC that can be held and can fail: nothing waits for
// it, and what it makes is what calls load.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>

#include "engine/cuda/runtime/background_compiler.h"
#include "engine/cuda/runtime/dynamic_library.h"
#include "engine/cuda/runtime/kernel.h"
#include "support/branch_counts.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/fake_cuda.h"
#include "support/layer_arrays.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "uniep/tuner.h"

namespace uniep::test {
namespace {

using cuda::BackgroundCompiler;
using cuda::KernelRequest;

struct FakeCompiler {
  FakeCompiler() {
    ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
    ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
    const cuda::DynamicLibrary library("the stand-in", "UNIEP_LIBCUDA", {});
    library.bind(hold, "fake_nvrtc_hold");
    library.bind(fail, "fake_nvrtc_fail");
    library.bind(begun, "fake_nvrtc_begun");
  }
  void (*hold)(int) = nullptr;
  void (*fail)(int) = nullptr;
  int (*begun)() = nullptr;
};

const FakeCompiler& nvrtc() {
  static const FakeCompiler loaded;
  return loaded;
}

std::vector<KernelRequest> kernels(int count, const std::string& name) {
  std::vector<KernelRequest> requests;
  for (int i = 0; i < count; ++i) {
    requests.push_back({.source = name + std::to_string(i), .function = "f", .macros = {}, .text = name});
  }
  return requests;
}

std::vector<std::byte> bytes_of(const std::vector<BFloat16>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 10000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(BackgroundCompiler, WaitsForNothingAndItsResultsAreKept) {
  BranchCounts branches;
  for (const bool folder : {true, false}) {
    const TemporaryFolder cache;
    const ScopedVariable variable("UNIEP_CACHE_DIR", folder ? cache.path() : "");
    const std::vector<KernelRequest> requests = kernels(5, "kept");
    const int before = nvrtc().begun();
    BackgroundCompiler compiler;
    nvrtc().hold(1);
    EXPECT_EQ(compiler.prepare(requests, {.owner = &compiler, .threads = 2}).compiling, 5);
    EXPECT_TRUE(comes_true([&] { return nvrtc().begun() == before + 2; }));
    EXPECT_EQ(compiler.threads(), 2);
    EXPECT_EQ(compiler.prepare(requests, {.owner = &compiler, .threads = 2}).compiling, 5);
    nvrtc().hold(0);
    EXPECT_TRUE(comes_true([&] { return compiler.prepare(requests, {&compiler, 2}).is_ready(); }));
    EXPECT_TRUE(comes_true([&] { return compiler.threads() == 0; }));
    EXPECT_EQ(nvrtc().begun(), before + 5);
    std::string cubin;
    const bool in_memory = compiler.find(requests[0], cubin);
    EXPECT_EQ(in_memory, !folder);
    branches.count("kept on disk", !in_memory);
    branches.count("kept in memory", in_memory && cubin == "none");
    // What the folder has, nobody compiles again.
    BackgroundCompiler another;
    const Preparation next = another.prepare(requests, {.owner = &another});
    EXPECT_EQ(next.is_ready(), folder);
  }
  branches.expect_all_taken();
}

TEST(BackgroundCompiler, SaysWhyOneFailsAndGoesOn) {
  const ScopedVariable variable("UNIEP_CACHE_DIR", "");
  const std::vector<KernelRequest> bad = kernels(1, "bad"), good = kernels(1, "good");
  BackgroundCompiler compiler;
  nvrtc().fail(1);
  EXPECT_TRUE(comes_true([&] { return !compiler.prepare(bad, {&compiler}).failed.empty(); }));
  nvrtc().fail(0);
  const Preparation failed = compiler.prepare(bad, {&compiler});
  EXPECT_TRUE(failed.failed.starts_with("device kernel bad0 does not compile")) << failed.failed;
  EXPECT_EQ(failed.failed.find('\n'), std::string::npos);
  EXPECT_FALSE(failed.is_ready());
  EXPECT_TRUE(comes_true([&] { return compiler.prepare(good, {&compiler}).is_ready(); }));
}

TEST(BackgroundCompiler, TwoThreadsThatAskForTheSameCompileItOnce) {
  const ScopedVariable variable("UNIEP_CACHE_DIR", "");
  const std::vector<KernelRequest> requests = kernels(40, "shared");
  const int before = nvrtc().begun();
  BackgroundCompiler compiler;
  std::vector<std::jthread> askers;
  for (int i = 0; i < 4; ++i) {
    askers.emplace_back([&, i] {
      EXPECT_TRUE(comes_true([&] { return compiler.prepare(requests, {.owner = &i, .threads = 4}).is_ready(); }));
    });
  }
  askers.clear();
  EXPECT_EQ(nvrtc().begun(), before + 40);
}

TEST(BackgroundCompiler, WhatNobodyAsksForAnyMoreIsDropped) {
  const ScopedVariable variable("UNIEP_CACHE_DIR", "");
  const std::vector<KernelRequest> mine = kernels(3, "mine");
  const int before = nvrtc().begun();
  int other = 0;
  std::jthread later;
  {
    BackgroundCompiler compiler;
    nvrtc().hold(1);
    compiler.prepare(mine, {.owner = &compiler});
    compiler.prepare(std::span(mine).last(1), {.owner = &other});
    EXPECT_TRUE(comes_true([&] { return nvrtc().begun() == before + 1; }));
    compiler.drop(&compiler);
    nvrtc().hold(0);
    EXPECT_TRUE(comes_true([&] { return compiler.threads() == 0; }));
    EXPECT_EQ(nvrtc().begun(), before + 2);  // the one that ran, and the other's
    // The end waits for the one that runs, and for no other.
    nvrtc().hold(1);
    compiler.prepare(kernels(10, "never"), {.owner = &other});
    EXPECT_TRUE(comes_true([&] { return nvrtc().begun() == before + 3; }));
    later = std::jthread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      nvrtc().hold(0);
    });
  }
  EXPECT_EQ(nvrtc().begun(), before + 3);
}

TEST(BackgroundCompiler, WithoutAThreadNothingIsLeftToIt) {
  nvrtc();
  Process child([&](const Reporter& reporter) {
    ::setenv("UNIEP_CACHE_DIR", "", 1);
    if (::geteuid() == 0 && ::setresuid(54322, 54322, 54322) != 0) return reporter.line("no other user");
    rlimit limit{};
    ::getrlimit(RLIMIT_NPROC, &limit);
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = 1;
    ::setrlimit(RLIMIT_NPROC, &limit);
    BackgroundCompiler compiler;
    const bool ready = compiler.prepare(kernels(3, "alone"), {&compiler}).is_ready();
    limit.rlim_cur = before;
    ::setrlimit(RLIMIT_NPROC, &limit);
    const int later = compiler.prepare(kernels(3, "alone"), {&compiler}).compiling;
    reporter.line((ready ? "ready, " : "not ready, ") + std::to_string(later > 0));
  });
  EXPECT_EQ(child.line(20), "ready, 1");
}

// A group on the stand-in for a GPU, and what its calls need.
class PreparedGroup : public testing::Test {
 protected:
  PreparedGroup() {
    nvrtc();
    options_.engine = EngineKind::kCuda;
    options_.ranks = layer_.ranks;
    options_.devices = {0, 1};
  }
  Schedule schedule(const Group& group, const char* fields, Direction direction = Direction::kForward) const {
    return resolve(PartialSchedule::parse(fields), {.direction = direction,
                                                    .shape = layer_.config.shape,
                                                    .numerics = layer_.config.numerics,
                                                    .machine = group.machine()});
  }

  const ScopedVariable cache_{"UNIEP_CACHE_DIR", ""};
  const RandomLayer layer_ = random_layer(
      5, {.ranks = {2}, .most_local_experts = 3, .most_tokens = 40, .columns = {{64, 32}}, .fewest_tokens = 40});
  GroupOptions options_;
};

TEST_F(PreparedGroup, CallsGoOnWhileItCompilesAndTakeWhatIsReady) {
  Group group(options_);
  LayerArrays arrays(layer_);
  const Placement placement = place(group, layer_.config.shape, arrays.routings);
  const Schedule own = schedule(group, "comm.stages=2"), other = schedule(group, "comm.stages=3");
  ASSERT_NE(own, other);
  const auto call = [&](const Schedule& one) {
    forward(group, layer_.config, one, placement, arrays.forward_arguments(), {.keep_saved = false});
    group.synchronize();
  };
  call(own);
  EXPECT_TRUE(prepare(group, layer_.config, own).is_ready());
  Schedule at_run_time = own;
  at_run_time.order.raster = own.order.raster == 8 ? 4 : 8;
  EXPECT_TRUE(prepare(group, layer_.config, at_run_time).is_ready());
  const int before = nvrtc().begun();
  nvrtc().hold(1);
  EXPECT_GT(prepare(group, layer_.config, other).compiling, 0);
  EXPECT_TRUE(comes_true([&] { return nvrtc().begun() > before; }));
  for (int i = 0; i < 5; ++i) call(own);
  EXPECT_FALSE(prepare(group, layer_.config, other).is_ready());
  nvrtc().hold(0);
  EXPECT_TRUE(comes_true([&] { return prepare(group, layer_.config, other).is_ready(); }));
  const int compiled = nvrtc().begun();
  call(other);
  EXPECT_EQ(nvrtc().begun(), compiled);  // loaded, not compiled again
}

TEST_F(PreparedGroup, ItsEndWaitsForNoCompilation) {
  nvrtc().hold(1);
  {
    Group group(options_);
    EXPECT_GT(prepare(group, layer_.config, schedule(group, "comm.stages=4")).compiling, 0);
    EXPECT_GT(prepare(group, layer_.config, schedule(group, "fusion=none,comm.stages=4", Direction::kBackward),
                      {.direction = Direction::kBackward})
                  .compiling,
              2);
  }
  nvrtc().hold(0);
}

TEST_F(PreparedGroup, RefusesWhatACallRefuses) {
  Group group(options_);
  Schedule bad = schedule(group, "");
  bad.order.raster = 0;
  expect_error(Status::kInvalidArgument, "schedule: ", [&] { prepare(group, layer_.config, bad); });
}

// The cpu engine has no kernels to compile; a stand-in compiles beside its calls.
TEST(Preparation, CallsOfTheCpuEngineGoOnAndTheTunerTakesWhatIsCompiled) {
  nvrtc();
  const ScopedVariable cache("UNIEP_CACHE_DIR", "");
  const RandomLayer layer = random_layer(4, {.ranks = {2}, .fewest_tokens = 8});
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  options.workers = 2;
  Group group(options);
  LayerArrays arrays(layer);
  const ScheduleRequest where{.direction = Direction::kForward,
                              .shape = layer.config.shape,
                              .numerics = layer.config.numerics,
                              .machine = group.machine()};
  ScheduleRequest back = where;
  back.direction = Direction::kBackward;
  TunerOptions tuned;
  tuned.machine = group.machine();
  TunerLayer& tuned_layer = tuned.layers.emplace_back();
  tuned_layer.config = layer.config;
  tuned_layer.tokens = 8;
  tuned_layer.forward = resolve({}, where);
  tuned_layer.backward = resolve({}, back);
  const Schedule begin = tuned.layers[0].forward;
  EXPECT_TRUE(prepare(group, layer.config, begin).is_ready());
  Schedule candidate = begin;
  candidate.order.raster = begin.order.raster == 8 ? 4 : 8;
  BackgroundCompiler compiler;
  int checks = 0;
  std::vector<std::string> log;
  tuned.candidates = [&](int, Direction, const Schedule&) { return std::vector<Schedule>{candidate}; };
  tuned.prepare = [&](int, Direction, const Schedule&) { return compiler.prepare(kernels(2, "slow"), {&compiler}); };
  tuned.check = [&](int, Direction, const Schedule&, const Schedule&) {
    ++checks;
    return TunerCheck{true, 0.001, ""};
  };
  tuned.log = [&](const std::string& line) { log.push_back(line); };
  tuned.budget = 1;
  Tuner tuner(tuned);
  const Placement placement = place(group, layer.config.shape, arrays.routings);
  forward(group, layer.config, begin, placement, arrays.forward_arguments(), {.keep_saved = false});
  const std::vector<std::byte> expected = bytes_of(arrays.result.y);
  int tried = 0;
  const auto step = [&] {
    if (tuner.wants_round()) tuner.begin_round();
    for (int i = 0; i < 4; ++i) {
      const TunerCall call = tuner.schedule(0, Direction::kForward);
      tried += call.schedule == candidate;
      arrays.reset();
      forward(group, layer.config, call.schedule, placement, arrays.forward_arguments(), {.keep_saved = false});
      EXPECT_EQ(bytes_of(arrays.result.y), expected);
      tuner.measured(call, {1.0});
    }
    tuner.step();
  };
  nvrtc().hold(1);
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(checks + tried, 0);
  EXPECT_EQ(tuner.spent().lost_milliseconds, 0);
  nvrtc().hold(0);
  EXPECT_TRUE(comes_true([&] { return compiler.threads() == 0; }));
  for (int i = 0; i < 20; ++i) step();
  EXPECT_EQ(checks, 1);
  EXPECT_GT(tried, 0);
  EXPECT_TRUE(log.at(0).find("1 candidate waits for kernels that are compiled in the background, 2 on rank 0") !=
              std::string::npos)
      << log.at(0);
}

}  // namespace
}  // namespace uniep::test
