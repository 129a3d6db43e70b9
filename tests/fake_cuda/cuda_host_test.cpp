// The host side of the cuda engine on a stand-in for the CUDA driver and NVRTC, on which kernels do nothing: what it
// takes, gives back and says when requests fail, when a group is aborted and when it is trimmed. No result is looked
// at: that needs a GPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/call_timer_state.h"
#include "engine/cuda/calls/engine.h"
#include "engine/cuda/runtime/dynamic_library.h"
#include "engine/cuda/runtime/kernel_cache.h"
#include "engine/cuda/runtime/nvml.h"
#include "support/expect_error.h"
#include "support/failing_heap.h"
#include "support/fake_cuda.h"
#include "support/layer_arrays.h"
#include "support/loaded_fake_cuda.h"
#include "uniep/call_timer.h"
#include "uniep/exchange.h"

namespace uniep::test {
namespace {

enum class Step {
  kConstruct,
  kPlace,
  kPlaceByNeed,
  kForward,
  kBackwardNow,
  kBackwardLater,
  kDispatch,
  kCombine,
  kBuffer
};
enum class Failing { kDriver, kHeap };

RandomLayer layer_of(int64_t tokens) {
  return random_layer(
      5,
      {.ranks = {2}, .most_local_experts = 3, .most_tokens = tokens, .columns = {{64, 32}}, .fewest_tokens = tokens});
}

GroupOptions options_of(const RandomLayer& layer) {
  GroupOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = layer.ranks;
  options.devices = {0, 1};
  return options;
}

// Two ranks on two devices, and a call of each kind.
class Calls {
 public:
  explicit Calls(const RandomLayer& layer) : layer_(layer), options_(options_of(layer)) {}

  bool is_constructed() const { return group_.has_value(); }
  Group& group() { return *group_; }

  // What a step needs of others, and its arguments.
  void prepare(Step step) {
    if (step == Step::kConstruct) return;
    if (!group_) group_.emplace(options_);
    const LayerConfig& config = layer_.config;
    forward_ = resolve({}, {.direction = Direction::kForward,
                            .shape = config.shape,
                            .numerics = config.numerics,
                            .machine = group_->machine()});
    backward_ = resolve({}, {.direction = Direction::kBackward,
                             .shape = config.shape,
                             .numerics = config.numerics,
                             .machine = group_->machine()});
    forwards_ = arrays_.forward_arguments();
    now_ = arrays_.backward_arguments(WeightGradientTime::kNow, false);
    later_ = arrays_.backward_arguments(WeightGradientTime::kLater, false);
    gradients_ = arrays_.weight_gradient_arguments();
    dispatches_.assign(static_cast<std::size_t>(layer_.ranks), {});
    combines_.assign(static_cast<std::size_t>(layer_.ranks), {});
    for (int rank = 0; rank < layer_.ranks; ++rank) {
      const auto of = static_cast<std::size_t>(rank);
      rows_[of].resize(static_cast<std::size_t>(kCapacity.rows * config.shape.hidden));
      dispatches_[of].x = layer_.data.x_of(rank);
      dispatches_[of].rows = rows_[of].data();
      combines_[of].rows = rows_[of].data();
      combines_[of].y = arrays_.result.y.data() + layer_.data.first_token(rank) * config.shape.hidden;
    }
    if (step == Step::kPlace || step == Step::kPlaceByNeed || step == Step::kBuffer) return;
    run(Step::kPlace);
    if (step == Step::kBackwardNow || step == Step::kBackwardLater) run(Step::kForward);
  }

  // `timer`: of a forward.
  void run(Step step, CallTimer* timer = nullptr) {
    const LayerConfig& config = layer_.config;
    switch (step) {
      case Step::kConstruct:
        group_.emplace(options_);
        return;
      case Step::kPlace:
      case Step::kPlaceByNeed:
        placement_ = place(*group_, config.shape, arrays_.routings, step == Step::kPlace ? kCapacity : Capacity{});
        return;
      case Step::kForward:
        saved_ = forward(*group_, config, forward_, placement_, forwards_, {.timer = timer});
        return;
      case Step::kBackwardNow:
        backward(*group_, config, backward_, saved_, now_);
        return;
      case Step::kBackwardLater:
        weight_gradients(*group_, backward(*group_, config, backward_, saved_, later_), gradients_);
        return;
      case Step::kDispatch:
        dispatch(*group_, config, forward_, placement_, dispatches_);
        return;
      case Step::kCombine:
        combine(*group_, config, forward_, placement_, combines_);
        return;
      case Step::kBuffer:
        group_->allocate_symmetric(4096);
        return;
    }
  }

 private:
  static constexpr Capacity kCapacity{4096, 128};

  const RandomLayer& layer_;
  const GroupOptions options_;
  LayerArrays arrays_{layer_};
  std::optional<Group> group_;
  Schedule forward_, backward_;
  std::vector<std::vector<BFloat16>> rows_{static_cast<std::size_t>(layer_.ranks)};
  Placement placement_;
  Saved saved_;
  std::vector<ForwardArguments> forwards_;
  std::vector<BackwardArguments> now_, later_;
  std::vector<WeightGradientArguments> gradients_;
  std::vector<DispatchArguments> dispatches_;
  std::vector<CombineArguments> combines_;
};

void arm(Failing failing, int64_t n) {
  heap_failed = false;
  fake().reset();
  if (failing == Failing::kDriver && n > 0) {
    ::setenv("FAKE_CUDA_FAIL", ("request:" + std::to_string(n) + ":2").c_str(), 1);
  } else {
    ::unsetenv("FAKE_CUDA_FAIL");
  }
  heap_countdown = failing == Failing::kHeap ? n : 0;
}

struct Seen {
  int64_t thrown = 0, borne = 0, recoveries = 0;
};

// True where the step made an n-th request, which failed: then the step has borne it, or thrown Error(kOutOfMemory),
// and the next one, after recover() where the group asks for it, must end well.
bool fails_well(Failing failing, Step step, bool grows, int64_t n, Seen& seen) {
  const RandomLayer layer = layer_of(40);
  Calls calls(layer);
  calls.prepare(step);
  bool thrown = false;
  const int before = fake().failures();
  if (calls.is_constructed() && grows) calls.group().trim();
  arm(failing, n);
  try {
    calls.run(step);
  } catch (const Error& error) {
    thrown = true;
    heap_countdown = 0;
    EXPECT_EQ(error.status(), Status::kOutOfMemory) << error.what();
  } catch (const std::exception& error) {
    thrown = true;
    heap_countdown = 0;
    ADD_FAILURE() << "not a uniep::Error: " << error.what();
  }
  const bool failed = fake().failures() > before || heap_failed;
  arm(failing, 0);
  EXPECT_TRUE(failed || !thrown) << "an error without a request that failed";
  if (!failed) return false;
  ++(thrown ? seen.thrown : seen.borne);
  try {
    calls.prepare(step);
    calls.run(step);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("recover()"), std::string::npos) << error.what();
    ++seen.recoveries;
    calls.group().recover();
    calls.prepare(step);
    calls.run(step);
  }
  return true;
}

struct Named {
  const char* name;
  Step step;
};

class FailingRequests : public testing::TestWithParam<Named> {};

// `grows`: kernels and cached memory are gone, so the step loads and takes what earlier calls had.
void fail_at_each(Failing failing, const Named& named, bool grows, const char* what) {
  int64_t tried = 0;
  Seen seen;
  int live = -1;
  const int64_t stride =
      grows && failing == Failing::kHeap ? 25 : 1;  // loading makes many short requests that are alike
  for (bool failed = true; failed && !testing::Test::HasFailure();) {
    SCOPED_TRACE("request " + std::to_string(stride * tried + 1));
    failed = fails_well(failing, named.step, grows, stride * tried + 1, seen);
    if (failed) ++tried;
    if (live < 0) live = fake().live();  // what the process keeps is there
    EXPECT_EQ(fake().live(), live) << "something of the device's is left";
  }
  std::printf("%s%s: %lld requests of the %s failed: %lld errors, %lld borne, %lld times recover() was needed\n",
              named.name, grows ? " after trim()" : "", static_cast<long long>(tried), what,
              static_cast<long long>(seen.thrown), static_cast<long long>(seen.borne),
              static_cast<long long>(seen.recoveries));
  EXPECT_GT(seen.thrown, 0);
  EXPECT_GT(tried, 0);
}

TEST_P(FailingRequests, OfTheDriverAtEachRequest) {
  fake();
  fail_at_each(Failing::kDriver, GetParam(), true, "driver");
}

TEST_P(FailingRequests, OfTheHeapAtEachRequest) {
  fake();
  for (const bool grows : {false, true}) fail_at_each(Failing::kHeap, GetParam(), grows, "heap");
}

INSTANTIATE_TEST_SUITE_P(Steps, FailingRequests,
                         testing::Values(Named{"Construct", Step::kConstruct}, Named{"Place", Step::kPlace},
                                         Named{"PlaceByNeed", Step::kPlaceByNeed}, Named{"Forward", Step::kForward},
                                         Named{"BackwardNow", Step::kBackwardNow},
                                         Named{"BackwardLater", Step::kBackwardLater},
                                         Named{"Dispatch", Step::kDispatch}, Named{"Combine", Step::kCombine},
                                         Named{"Buffer", Step::kBuffer}),
                         [](const testing::TestParamInfo<Named>& named) { return named.param.name; });

constexpr Step kAllSteps[] = {Step::kPlace,         Step::kForward,  Step::kBackwardNow,
                              Step::kBackwardLater, Step::kDispatch, Step::kCombine};

TEST(CudaGroup, WhatACallHasLaunchedBeforeItFailsIsWaitedForAndTheGroupSaysSo) {
  fake();
  const RandomLayer layer = layer_of(40);
  for (const Step step : kAllSteps) {
    SCOPED_TRACE("step " + std::to_string(static_cast<int>(step)));
    int failures = 0, refusals = 0;
    for (bool failed = true; failed;) {
      Calls calls(layer);
      calls.prepare(step);
      fake().reset();
      ::setenv("FAKE_CUDA_FAIL", ("cuLaunchKernelEx:" + std::to_string(failures + 1) + ":2").c_str(), 1);
      const int before = fake().failures();
      try {
        calls.run(step);
      } catch (const Error&) {
      }
      ::unsetenv("FAKE_CUDA_FAIL");
      failed = fake().failures() > before;
      EXPECT_EQ(fake().kernels_behind_events(), 0) << "launch " << failures + 1;
      failures += failed ? 1 : 0;
      try {
        calls.group().check();
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("call Group::recover() before the next one"), std::string::npos);
        ++refusals;
      }
      calls.group().recover();
      calls.group().check();
    }
    EXPECT_GT(failures, 1);
    // Ranks do not wait for each other in later weight gradients, and a placement has a report of its own.
    const bool meet = step != Step::kPlace && step != Step::kBackwardLater;
    EXPECT_TRUE(refusals > 0 || !meet);
    EXPECT_LT(refusals, failures);
  }
}

TEST(CudaGroup, TwentyAbortsAndRestartsLeaveNothing) {
  fake();
  const RandomLayer layer = layer_of(40);
  int live = -1;
  for (int round = 0; round < 21; ++round) {
    {
      Calls calls(layer);
      for (const Step step : kAllSteps) {
        calls.prepare(step);
        calls.run(step);
      }
      EXPECT_GT(calls.group().memory(1).symmetric_bytes, 0u);
      calls.group().abort();
      calls.group().abort();
      for (const Step step : kAllSteps) {
        expect_error(Status::kTimeout, "group: aborted", [&] { calls.run(step); });
      }
      expect_error(Status::kTimeout, "group: aborted", [&] { calls.group().recover(); });
      calls.group().leave();
    }
    if (live < 0) live = fake().live();
    EXPECT_EQ(fake().live(), live);
  }
}

TEST(CudaGroup, TrimGivesBackModulesAndCachedMemory) {
  fake();
  const RandomLayer layer = layer_of(40);
  std::size_t held = 0;
  for (int round = 0; round < 3; ++round) {
    Calls calls(layer), others(layer);
    others.prepare(Step::kForward);
    others.run(Step::kForward);  // its functions are void after the other's trim()
    for (const Step step : kAllSteps) {
      calls.prepare(step);
      calls.run(step);
    }
    const std::size_t before = calls.group().memory(0).workspace_bytes;
    EXPECT_GT(fake().modules(), 0);
    calls.group().trim();
    EXPECT_EQ(fake().modules(), 0);
    EXPECT_LT(calls.group().memory(0).workspace_bytes, before);
    if (round > 0) {
      EXPECT_EQ(calls.group().memory(0).workspace_bytes, held);
    }
    held = calls.group().memory(0).workspace_bytes;
    others.run(Step::kForward);
    for (const Step step : kAllSteps) calls.run(step);
  }
}

// With a rank a GPU a lent launch begins on the SMs that are free, and has CTAs for later; ranks that share a GPU need
// all of theirs at once.
TEST(CudaGroup, ALaunchNeedsNoSmThatIsLent) {
  fake();
  const RandomLayer layer = layer_of(16);
  for (const bool shared : {false, true}) {
    GroupOptions options = options_of(layer);
    if (shared) options.devices = {0};
    Group group(options);
    LayerArrays arrays(layer);
    const Placement placement = place(group, layer.config.shape, arrays.routings, Capacity{4096, 128});
    const auto run = [&](const std::string& text) {
      const Schedule schedule = resolve(PartialSchedule::parse(text), {.direction = Direction::kForward,
                                                                       .shape = layer.config.shape,
                                                                       .numerics = layer.config.numerics,
                                                                       .machine = group.machine()});
      forward(group, layer.config, schedule, placement, arrays.forward_arguments());
    };
    const int ranks = shared ? layer.ranks : 1;
    const int reserved = group.workers() / 2;
    const std::string kept = "comm.reserve_sms=" + std::to_string(reserved);
    run(kept);
    EXPECT_EQ(fake().layer_ctas(), ranks * (group.workers() - reserved));
    EXPECT_TRUE(fake().layer_is_cooperative());
    run(kept + ",comm.lend_sms=on");
    EXPECT_EQ(fake().layer_ctas(), ranks * group.workers());
    EXPECT_EQ(fake().layer_is_cooperative(), shared);
  }
}

TEST(CudaGroup, RefusesWhatItsRecordsCanNotCount) {
  fake();
  const RandomLayer layer = layer_of(40);
  Group group(options_of(layer));
  LayerArrays arrays(layer);
  const auto memory_of = [&](int64_t hidden, int64_t intermediate) {
    LayerConfig config = layer.config;
    config.shape.hidden = hidden;
    config.shape.intermediate = intermediate;
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = config.shape,
                                           .numerics = config.numerics,
                                           .machine = group.machine()});
    const Placement placement = place(group, config.shape, arrays.routings, {4096, 128});
    return memory_need(group, config, schedule, placement).size();
  };
  EXPECT_EQ(memory_of(524280, 524280), 2u);
  expect_error(Status::kUnsupported, "hidden: 524288; on cuda a layer has up to 524280 columns",
               [&] { memory_of(524288, 64); });
  expect_error(Status::kUnsupported, "intermediate: 524288; on cuda a layer has up to 524280 columns",
               [&] { memory_of(64, 524288); });
  const auto forward_of = [&](int64_t rows) {
    const LayerConfig& config = layer.config;
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = config.shape,
                                           .numerics = config.numerics,
                                           .machine = group.machine()});
    const Placement placement = place(group, config.shape, arrays.routings, {rows, 128});
    forward(group, config, schedule, placement, arrays.forward_arguments());
  };
  forward_of(65535 * 128);
  expect_error(Status::kUnsupported, "rows: 8388608 on rank 0; on cuda forward takes up to 8388480 rows of a rank",
               [&] { forward_of(65536 * 128); });
}

void capture_forward(Calls& calls) {
  fake().capture(1);
  calls.run(Step::kForward);
  fake().capture(0);
}

// Behind the others that look at modules: what is kept is kept for the process.
TEST(CudaGroup, TrimKeepsWhatACapturedCallLaunches) {
  fake();
  const RandomLayer layer = layer_of(40);
  Calls calls(layer);
  calls.prepare(Step::kForward);
  calls.run(Step::kForward);
  calls.group().trim();
  EXPECT_EQ(fake().modules(), 0);
  capture_forward(calls);  // with a placement of before, whose kernels are loaded again
  const int captured = fake().modules();
  EXPECT_GT(captured, 0);
  calls.group().trim();
  EXPECT_EQ(fake().modules(), captured);
}

// A replay may write there as long as the Group lives.
TEST(CudaGroup, ATimersMemoryStaysWithACapturedCall) {
  fake();
  const RandomLayer layer = layer_of(40);
  Calls calls(layer);
  calls.prepare(Step::kForward);
  const auto memory_of = [&](bool captured) {
    CallTimer timer(calls.group());
    fake().capture(captured ? 1 : 0);
    calls.run(Step::kForward, &timer);
    fake().capture(0);
    return timer.state().ranks.get();
  };
  internal::RankTimes* const first = memory_of(false);
  EXPECT_EQ(memory_of(true), first);
  EXPECT_NE(memory_of(false), first);
}

TEST(CudaGroup, SynchronizeTellsAFailedCallBeforeItWaitsForReplays) {
  fake();
  const RandomLayer layer = layer_of(40);
  ::setenv("UNIEP_ARRIVAL_TIMEOUT_S", "0.3", 1);
  Calls calls(layer);
  calls.prepare(Step::kForward);
  ::unsetenv("UNIEP_ARRIVAL_TIMEOUT_S");
  calls.run(Step::kForward);
  fake().replay(1);
  calls.group().synchronize();  // nothing was captured, so what else the GPUs do does not matter
  capture_forward(calls);
  for (const bool recovers : {false, true}) {
    expect_error(Status::kTimeout, "device 0: work in streams where graphs may be replayed is not over within 0.3 s",
                 [&] { recovers ? calls.group().recover() : calls.group().synchronize(); });
  }
  fake().fail_call();
  calls.run(Step::kForward);
  expect_error(Status::kTimeout, "recover() makes the group usable again", [&] { calls.group().synchronize(); });
  expect_error(Status::kTimeout, "call Group::recover() before the next one", [&] { calls.group().synchronize(); });
  fake().replay(0);
  calls.group().recover();
  calls.group().synchronize();
  ::setenv("FAKE_CUDA_FAIL", "cuCtxSynchronize:+1:900", 1);
  expect_error(Status::kUnsupported, "device 0: replays can not be waited for while a stream of it is captured",
               [&] { calls.group().synchronize(); });
  ::unsetenv("FAKE_CUDA_FAIL");
  calls.group().synchronize();
}

TEST(GpuState, IsWhatNvmlSaysOfIt) {
  fake();
  EXPECT_EQ(cuda::gpu_state(0).driver, "");  // no NVML here
  ::setenv("UNIEP_LIBNVML", UNIEP_FAKE_CUDA, 1);
  EXPECT_EQ(cuda::gpu_state(0).serial, "serial number 17");
  EXPECT_EQ(cuda::gpu_state(1).serial, "GPU-2");
  EXPECT_EQ(cuda::speed_label(0), "driver 580.1, 500 W");
  EXPECT_EQ(cuda::speed_label(1), "driver 580.1, 700 W");
  EXPECT_EQ(cuda::kernels_label(), "kernels " + cuda::sources_label());
  ::unsetenv("UNIEP_LIBNVML");
  EXPECT_EQ(cuda::sources_label().size(), 8u);
}

}  // namespace
}  // namespace uniep::test
