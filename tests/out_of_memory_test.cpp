#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/failing_heap.h"
#include "support/layer_arrays.h"
#include "uniep/exchange.h"

// Memory that runs out at the n-th request, for each n until none fails, on the cpu engine: of the Group's Allocator,
// and of the C++ heap.
namespace uniep::test {
namespace {

// The Group's Allocator, with the same count.
struct FailingAllocator {
  int64_t countdown = 0, live = 0;
  bool failed = false;

  static void* allocate(void* context, std::size_t bytes, std::size_t alignment, int, Stream) {
    auto& own = *static_cast<FailingAllocator*>(context);
    if (own.countdown > 0 && --own.countdown == 0) {
      own.failed = true;
      return nullptr;
    }
    ++own.live;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  static void release(void* context, void* memory, std::size_t, int, Stream) {
    --static_cast<FailingAllocator*>(context)->live;
    std::free(memory);
  }
  Allocator allocator() { return {allocate, release, this}; }
};

enum class Step { kPlace, kForward, kBackwardNow, kBackwardLater, kDispatch, kCombine, kSymmetric };
enum class Failing { kAllocator, kHeap };

RandomLayer layer_of(uint64_t seed, int64_t tokens) {
  return random_layer(
      seed,
      {.ranks = {2}, .most_local_experts = 3, .most_tokens = tokens, .columns = {{32, 24}}, .fewest_tokens = tokens});
}

// A group, and what one step on it reads and writes.
class Run {
 public:
  Run(FailingAllocator& allocator, const RandomLayer& layer, bool grows)
      : layer_(layer), group_(options(allocator, layer)) {
    forward_ = resolve({}, {.direction = Direction::kForward,
                            .shape = layer.config.shape,
                            .numerics = layer.config.numerics,
                            .machine = group_.machine()});
    backward_ = resolve({}, {.direction = Direction::kBackward,
                             .shape = layer.config.shape,
                             .numerics = layer.config.numerics,
                             .machine = group_.machine()});
    if (grows) run_small();
  }

  Group& group() { return group_; }

  // What the step needs of others.
  void prepare(Step step) {
    arrays_.reset();
    if (step == Step::kPlace) return;
    placement_ = place(group_, layer_.config.shape, arrays_.routings);
    if (step == Step::kBackwardNow || step == Step::kBackwardLater) saved_ = run_forward();
    for (int rank = 0; rank < layer_.ranks; ++rank) {
      const int64_t values = placement_.padded_rows(rank) * layer_.config.shape.hidden;
      rows_[rank].assign(values, BFloat16{0xffff});
      if (step == Step::kCombine) {
        for (int64_t i = 0; i < values; ++i) rows_[rank][i] = layer_.data.x[i % layer_.data.x.size()];
      }
    }
    dispatched_.assign(layer_.ranks, {});
    combined_.assign(layer_.ranks, {});
    for (int rank = 0; rank < layer_.ranks; ++rank) {
      dispatched_[rank] = {layer_.data.x_of(rank), rows_[rank].data(), nullptr, {}};
      combined_[rank].rows = rows_[rank].data();
      combined_[rank].y = arrays_.result.y.data() + layer_.data.first_token(rank) * layer_.config.shape.hidden;
    }
    forward_arguments_ = arrays_.forward_arguments();
    now_ = arrays_.backward_arguments(WeightGradientTime::kNow, false);
    later_ = arrays_.backward_arguments(WeightGradientTime::kLater, false);
    gradients_ = arrays_.weight_gradient_arguments();
  }

  void run(Step step) {
    const LayerConfig& config = layer_.config;
    switch (step) {
      case Step::kPlace:
        placement_ = place(group_, config.shape, arrays_.routings);
        return;
      case Step::kForward:
        saved_ = forward(group_, config, forward_, placement_, forward_arguments_);
        return;
      case Step::kBackwardNow:
        backward(group_, config, backward_, saved_, now_);
        return;
      case Step::kBackwardLater:
        weight_gradients(group_, backward(group_, config, backward_, saved_, later_), gradients_);
        return;
      case Step::kDispatch:
        dispatch(group_, config, forward_, placement_, dispatched_);
        return;
      case Step::kCombine:
        combine(group_, config, forward_, placement_, combined_);
        return;
      case Step::kSymmetric:
        for (int rank = 0; rank < layer_.ranks; ++rank) {
          const SymmetricBuffer buffer = group_.allocate_symmetric(4096);
          static_cast<std::byte*>(buffer.data(rank))[4095] = std::byte{1};
        }
        return;
    }
  }

  // All bytes that the step has written.
  std::string written(Step step) {
    std::string all;
    const auto add = [&all](const auto& values) {
      all.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
    };
    if (step == Step::kPlace) {
      saved_ = run_forward();
      add(arrays_.result.y);
    }
    if (step == Step::kForward) {
      arrays_.result.z.clear();
      arrays_.gather_z(saved_);
      add(arrays_.result.z);
    }
    if (step == Step::kDispatch) {
      for (const std::vector<BFloat16>& rows : rows_) add(rows);
    }
    if (step == Step::kForward || step == Step::kCombine) add(arrays_.result.y);
    if (step == Step::kBackwardNow || step == Step::kBackwardLater) {
      add(arrays_.result.dx);
      add(arrays_.result.dprobs);
      add(arrays_.result.dw1_bf16);
      add(arrays_.result.dw2_bf16);
      add(arrays_.result.dw1_fp32);
      add(arrays_.result.dw2_fp32);
    }
    return all;
  }

 private:
  static GroupOptions options(FailingAllocator& allocator, const RandomLayer& layer) {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = layer.ranks;
    options.workers = 2;
    options.allocator = allocator.allocator();
    return options;
  }

  // So that the step makes memory grow that is there.
  void run_small() {
    const RandomLayer small = layer_of(3, 2);
    LayerArrays arrays(small);
    const Placement placement = place(group_, small.config.shape, arrays.routings);
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = small.config.shape,
                                           .numerics = small.config.numerics,
                                           .machine = group_.machine()});
    forward(group_, small.config, schedule, placement, arrays.forward_arguments());
  }

  Saved run_forward() { return forward(group_, layer_.config, forward_, placement_, arrays_.forward_arguments()); }

  const RandomLayer& layer_;
  Group group_;
  Schedule forward_, backward_;
  LayerArrays arrays_{layer_};
  std::vector<std::vector<BFloat16>> rows_{static_cast<std::size_t>(layer_.ranks)};
  Placement placement_;
  Saved saved_;
  std::vector<ForwardArguments> forward_arguments_;
  std::vector<BackwardArguments> now_, later_;
  std::vector<WeightGradientArguments> gradients_;
  std::vector<DispatchArguments> dispatched_;
  std::vector<CombineArguments> combined_;
};

void arm(Failing failing, FailingAllocator& allocator, int64_t n) {
  heap_failed = allocator.failed = false;
  allocator.countdown = failing == Failing::kAllocator ? n : 0;
  heap_countdown = failing == Failing::kHeap ? n : 0;
}

// True where the n-th request of `step` was made, and so failed. The step must then have thrown Error(kOutOfMemory) and
// kept nothing, and the next one, after recover() where the group asks for it, must write `expected`.
bool fails_well(Failing failing, Step step, bool grows, int64_t n, const RandomLayer& layer,
                const std::string& expected, FailingAllocator& allocator, int64_t& recoveries) {
  Run run(allocator, layer, grows);
  run.prepare(step);
  const int64_t live = allocator.live;
  bool thrown = false;
  arm(failing, allocator, n);
  try {
    run.run(step);
    arm(failing, allocator, 0);
    return false;
  } catch (const Error& error) {
    thrown = heap_failed || allocator.failed;
    arm(failing, allocator, 0);
    EXPECT_EQ(error.status(), Status::kOutOfMemory) << error.what();
  } catch (const std::exception& error) {
    arm(failing, allocator, 0);
    ADD_FAILURE() << "not a uniep::Error: " << error.what();
  }
  EXPECT_TRUE(thrown) << "an error without a request that failed";
  EXPECT_EQ(allocator.live, live) << "memory that the failed call took is kept";
  const auto again = [&] {
    run.prepare(step);
    run.run(step);
  };
  try {
    again();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("Group::recover()"), std::string::npos) << error.what();
    ++recoveries;
    run.group().recover();
    again();
  }
  EXPECT_TRUE(run.written(step) == expected) << "other bytes after the failure";
  return true;
}

std::string written_without_failure(Step step, const RandomLayer& layer) {
  FailingAllocator allocator;
  Run run(allocator, layer, false);
  run.prepare(step);
  run.run(step);
  return run.written(step);
}

struct Named {
  const char* name;
  Step step;
  bool allocates;  // of the Group's Allocator
};

class FailingRequests : public testing::TestWithParam<Named> {};

void fail_at_each(Failing failing, const Named& named, bool grows, const char* what) {
  const RandomLayer layer = layer_of(5, 40);
  const std::string expected = written_without_failure(named.step, layer);
  ASSERT_EQ(expected.empty(), named.step == Step::kSymmetric);
  FailingAllocator allocator;
  int64_t tried = 0, recoveries = 0, heap_before = -1;
  for (bool failed = true; failed && !testing::Test::HasFailure();) {
    SCOPED_TRACE("request " + std::to_string(tried + 1));
    failed = fails_well(failing, named.step, grows, tried + 1, layer, expected, allocator, recoveries);
    EXPECT_EQ(allocator.live, 0) << "the group has left memory of its allocator";
    if (failed) ++tried;
    if (heap_before < 0) heap_before = heap_live;  // what the first group makes once for the process is there
    EXPECT_EQ(heap_live, heap_before) << "the heap has other blocks than after the first group";
  }
  std::printf("%s%s: %lld requests of the %s failed, %lld times recover() was needed\n", named.name,
              grows ? " after a smaller layer" : "", static_cast<long long>(tried), what,
              static_cast<long long>(recoveries));
  EXPECT_GT(tried, 0);
}

TEST_P(FailingRequests, OfTheAllocatorAtEachRequest) {
  if (GetParam().allocates) {
    for (const bool grows : {false, true}) fail_at_each(Failing::kAllocator, GetParam(), grows, "allocator");
    return;
  }
  FailingAllocator allocator;  // then the step must not ask it
  int64_t recoveries = 0;
  EXPECT_FALSE(fails_well(Failing::kAllocator, GetParam().step, true, 1, layer_of(5, 40), "", allocator, recoveries));
}

TEST_P(FailingRequests, OfTheHeapAtEachRequest) {
  for (const bool grows : {false, true}) fail_at_each(Failing::kHeap, GetParam(), grows, "heap");
}

INSTANTIATE_TEST_SUITE_P(Steps, FailingRequests,
                         testing::Values(Named{"Place", Step::kPlace, false}, Named{"Forward", Step::kForward, true},
                                         Named{"BackwardNow", Step::kBackwardNow, true},
                                         Named{"BackwardLater", Step::kBackwardLater, true},
                                         Named{"Dispatch", Step::kDispatch, false},
                                         Named{"Combine", Step::kCombine, false},
                                         Named{"Symmetric", Step::kSymmetric, true}),
                         [](const testing::TestParamInfo<Named>& named) { return named.param.name; });

TEST(FailingRequestsOfAGroup, OfTheHeapInTheConstructorAtEachRequest) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 3;
  { const Group first(options); }
  const int64_t live = heap_live;
  int64_t tried = 0;
  for (bool failed = true; failed; ++tried) {
    failed = false;
    heap_countdown = tried + 1;
    try {
      const Group group(options);
      heap_countdown = 0;
    } catch (const Error& error) {
      heap_countdown = 0;
      failed = true;
      EXPECT_EQ(error.status(), Status::kOutOfMemory) << error.what();
    }
    EXPECT_EQ(heap_live, live) << "request " << tried + 1;
  }
  std::printf("constructor: %lld requests of the heap failed\n", static_cast<long long>(tried - 1));
  EXPECT_GT(tried, 1);
}

}  // namespace
}  // namespace uniep::test
