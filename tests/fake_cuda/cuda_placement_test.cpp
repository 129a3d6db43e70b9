// What the host says and does around placements within a capacity, on a stand-in for the CUDA driver, on which kernels
// do nothing.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "engine/cuda/device/arguments/place_arguments.h"
#include "engine/cuda/runtime/dynamic_library.h"
#include "support/expect_error.h"
#include "support/fake_cuda.h"
#include "support/layer_arrays.h"

namespace uniep::test {
namespace {

class CudaPlacement : public testing::Test {
 protected:
  CudaPlacement() {
    ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
    ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
    const cuda::DynamicLibrary library("the stand-in", "UNIEP_LIBCUDA", {});
    library.bind(reset_, "fake_cuda_reset");
    library.bind(fail_, "fake_cuda_fail_last_place");
    library.bind(fail_in_place_, "fake_cuda_fail_last_call_in_place");
    library.bind(first_tiles_, "fake_cuda_layer_first_tiles");
    library.bind(launches_, "fake_cuda_launches");
    library.bind(lookups_behind_launch_, "fake_cuda_lookups_behind_launch");
    options_.engine = EngineKind::kCuda;
    options_.ranks = layer_.ranks;
    options_.devices = {0, 1};
  }

  Placement placed(Group& group) { return place(group, layer_.config.shape, arrays_.routings, {4096, 0}); }
  void run_forward(Group& group, const Placement& placement) { run_forward(group, placement, layer_.config); }
  void run_forward(Group& group, const Placement& placement, const LayerConfig& config) {
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = config.shape,
                                           .numerics = config.numerics,
                                           .machine = group.machine()});
    forward(group, config, schedule, placement, arrays_.forward_arguments());
  }

  RandomLayer layer_ = random_layer(
      5, {.ranks = {2}, .most_local_experts = 3, .most_tokens = 40, .columns = {{64, 512}}, .fewest_tokens = 40});
  LayerArrays arrays_{layer_};
  GroupOptions options_;
  void (*reset_)() = nullptr;
  void (*fail_)(int) = nullptr;
  void (*fail_in_place_)() = nullptr;
  int (*first_tiles_)() = nullptr;
  int (*launches_)(const char*) = nullptr;
  int (*lookups_behind_launch_)() = nullptr;
};

TEST_F(CudaPlacement, SaysWhatIsWrongWhereItsRowsAreAsked) {
  Group group(options_);
  const Placement first = placed(group), placement = placed(group);
  fail_(static_cast<int>(cuda::PlaceFault::kOverflow));
  expect_error(Status::kOverflow, "rank 1", [&] { placement.rows(0); });
  EXPECT_EQ(placement.rows(0), 0);  // it is empty, and that was said
  group.check();
  const Placement later = placed(group);
  fail_(static_cast<int>(cuda::PlaceFault::kPeerFailed));
  for (int again = 0; again < 2; ++again) {
    EXPECT_THROW(placement.expert_rows(0), Error);  // until recover()
  }
  group.recover();
  EXPECT_EQ(placement.rows(0), 0);
}

// Its counts are none, and rows would be written by them.
TEST_F(CudaPlacement, ByNeedEndsBehindItsCountsWhereTheCallBeforeHasFailed) {
  Group group(options_);
  const Placement placement = placed(group);
  run_forward(group, placement);
  reset_();
  fail_in_place_();
  expect_error(Status::kTimeout, "recover() makes the group usable again",
               [&] { place(group, layer_.config.shape, arrays_.routings); });
  EXPECT_EQ(launches_("uniep_place"), 2);  // one a device
  group.recover();
  reset_();
  place(group, layer_.config.shape, arrays_.routings);
  EXPECT_EQ(launches_("uniep_place"), 4);
}

TEST_F(CudaPlacement, OutlivesItsGroup) {
  std::optional<Group> group(options_);
  const Placement placement = placed(*group);
  group.reset();
  EXPECT_EQ(placement.rows(1), 0);
}

TEST_F(CudaPlacement, ServesTheGroupThatMadeIt) {
  Group group(options_), other(options_);
  const Placement placement = placed(group);
  run_forward(group, placement);
  for (const bool has_placed : {false, true}) {
    if (has_placed) placed(other);
    expect_error(Status::kInvalidArgument,
                 "placement: made within a capacity by another Group; call place() with this one",
                 [&] { run_forward(other, placement); });
  }
  run_forward(other, placed(other));
}

// Layers of one shape may share it, and a gate doubles FC1's tiles.
TEST_F(CudaPlacement, HasAProgramForEachActivation) {
  Group group(options_);
  const Placement placement = placed(group);
  LayerConfig gated = layer_.config, plain = layer_.config;
  gated.numerics.activation = Activation::kSwiglu;
  plain.numerics.activation = Activation::kRelu2;
  run_forward(group, placement, gated);
  const int with_gate = first_tiles_();
  EXPECT_GT(with_gate, 0);
  run_forward(group, placement, plain);
  EXPECT_LT(first_tiles_(), with_gate);
}

// A look for a kernel may wait for those that run, and they for one that is not launched yet.
TEST_F(CudaPlacement, LooksForNoKernelBehindTheFirstOfACall) {
  options_.nan_on_overflow = true;
  Group group(options_);
  const Placement placement = placed(group);
  reset_();
  run_forward(group, placement);
  EXPECT_GT(launches_("uniep_empty_nan"), 0);
  EXPECT_EQ(lookups_behind_launch_(), 0);
}

}  // namespace
}  // namespace uniep::test
