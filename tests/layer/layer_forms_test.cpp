#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/disturb.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/random_layer.h"

// How weights, gradients and routings are handed over: gate and up apart, and dense routing. No form changes a bit.
namespace uniep::test {
namespace {

void run_case(uint64_t seed, BranchCounts& branches) {
  RandomLayer layer = random_layer(seed, {.most_local_experts = 8});
  Random random(seed * 7919);
  cli::RunnerOptions form;
  form.apart = random.one_in(2);
  form.dense = !form.apart || random.one_in(2);
  form.by_address = random.one_in(2);
  form.later = random.one_in(2);
  if (form.dense) layer.data = with_ascending_slots(layer.data);
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  options.workers = static_cast<int>(random.between(1, 6));
  Group group(options);
  disturb(group, {.shuffle_seed = random.one_in(4) ? 0 : std::max<uint64_t>(random.next(), 1)});
  const LayerConfig& config = layer.config;
  const Schedule forward = sample_legal(random.next(), {.direction = Direction::kForward,
                                                        .shape = config.shape,
                                                        .numerics = config.numerics,
                                                        .machine = group.machine()});
  PartialSchedule fixed;
  agree_on_saves(fixed, forward, random, false);
  const Schedule backward = sample_legal(random.next(),
                                         {.direction = Direction::kBackward,
                                          .shape = config.shape,
                                          .numerics = config.numerics,
                                          .machine = group.machine()},
                                         fixed);
  SCOPED_TRACE(layer.description + "\n" + to_text(forward) + "\n" + to_text(backward));
  cli::LayerRunner runner(group, config, layer.data, form);
  for (int rank = 0; rank < layer.ranks; ++rank) EXPECT_EQ(runner.placement().dense(rank), form.dense);
  runner.forward(forward);
  runner.backward(backward);
  EXPECT_EQ(difference(runner.result(), run_sequential(layer)), "");

  const int64_t intermediate = config.shape.intermediate;
  branches.count("apart, one tensor", form.apart && !form.by_address);
  branches.count("apart, addresses", form.apart && form.by_address);
  branches.count("apart, a tile of dW1 with gate and up rows", form.apart && intermediate % 128 != 0);
  branches.count("apart, no multiple of 16", form.apart && intermediate % 16 != 0);
  branches.count("dense", form.dense);
  branches.count("apart and dense", form.apart && form.dense);
  branches.count("weight gradients now", !form.later);
  branches.count("weight gradients later", form.later);
  for (const WeightGradient mode : {WeightGradient::kBFloat16, WeightGradient::kFloat32, WeightGradient::kMainGrad}) {
    const std::string name = "apart, weight gradient " + std::to_string(static_cast<int>(mode));
    branches.count(name.c_str(), form.apart && config.numerics.weight_gradient == mode);
  }
  count_layer(branches, layer);
}

TEST(LayerForms, EveryFormGivesTheBitsOfTheSequentialRun) {
  BranchCounts branches;
  const uint64_t cases = from_environment("UNIEP_TEST_COMBINATIONS", 200);
  for (uint64_t seed = 1; seed <= cases; ++seed) {
    run_case(seed, branches);
    ASSERT_FALSE(HasFatalFailure() || HasNonfatalFailure()) << "case " << seed;
  }
  branches.expect_all_taken();
}

// A layer whose arguments a test spoils.
class GivenArguments : public testing::Test {
 protected:
  GivenArguments() : group_(options()), x_(16, BFloat16{0}), weights_(256, BFloat16{0}), gradients_(256) {
    config_.shape = {8, 8, 2, 1};
    config_.numerics.weight_gradient = WeightGradient::kFloat32;
    forward_.x = x_.data();
    forward_.y = y_;
    forward_.weights.w1 = weights_.data();
    forward_.weights.w2 = weights_.data();
  }
  static GroupOptions options() {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    return options;
  }
  Placement placed() { return place(group_, config_.shape, {&routing_, 1}); }
  Schedule schedule(Direction direction) {
    return resolve(
        {},
        {.direction = direction, .shape = config_.shape, .numerics = config_.numerics, .machine = group_.machine()});
  }
  Saved run_forward() {
    return uniep::forward(group_, config_, schedule(Direction::kForward), placed(), {&forward_, 1});
  }

  Group group_;
  LayerConfig config_;
  std::vector<BFloat16> x_, weights_;
  std::vector<float> gradients_;
  BFloat16 y_[16] = {};
  std::vector<uint8_t> map_{0, 1, 1, 0};
  std::vector<float> probs_{0.5f, 0.25f, 1.0f, 2.0f};
  Routing routing_{2, nullptr, IndexType::kInt32, probs_.data(), {}, map_.data()};
  ForwardArguments forward_;
};

TEST_F(GivenArguments, GateAndUpAreGivenAlike) {
  const BFloat16* experts[2] = {weights_.data(), weights_.data()};
  const auto refused = [&](const char* message) {
    expect_error(Status::kInvalidArgument, message, [&] { run_forward(); });
  };
  forward_.weights.w1_up_experts = experts;
  refused("w1_up: addresses on rank 0, and w1 one tensor; gate and up are both one tensor or both addresses");
  forward_.weights.w1_experts = experts;
  EXPECT_NO_THROW(run_forward());
  experts[1] = nullptr;
  refused("null for local expert 1 on rank 0");
  forward_.weights.w1_up_experts = nullptr;
  experts[1] = weights_.data();
  forward_.weights.w1_up = weights_.data();
  refused("w1_up: one tensor on rank 0, and w1 addresses");
  forward_.weights.w1_experts = nullptr;
  EXPECT_NO_THROW(run_forward());
  forward_.weights.w1 = nullptr;
  refused("w1: null on rank 0");
}

TEST_F(GivenArguments, AnUpWithoutAGateIsNoGradient) {
  const Saved saved = run_forward();
  BFloat16 dx[16];
  float dprobs[4];
  BackwardArguments arguments;
  arguments.dy = x_.data();
  arguments.weights = forward_.weights;
  arguments.dx = dx;
  arguments.dprobs = dprobs;
  arguments.gradients.dw1_up = gradients_.data();
  arguments.gradients.dw2 = gradients_.data();
  const auto run = [&] {
    return uniep::backward(group_, config_, schedule(Direction::kBackward), saved, {&arguments, 1});
  };
  expect_error(Status::kInvalidArgument, "dw1: null on rank 0", run);
  arguments.weight_gradients = WeightGradientTime::kLater;
  const PendingWeightGradients work = run();
  WeightGradientArguments later;
  later.gradients.dw1_up = gradients_.data();
  expect_error(Status::kInvalidArgument, "dw1: null on rank 0", [&] { weight_gradients(group_, work, {&later, 1}); });
}

TEST_F(GivenArguments, BadMapsAreNamed) {
  const auto refused = [&](const char* message) { expect_error(Status::kInvalidArgument, message, [&] { placed(); }); };
  EXPECT_TRUE(placed().dense(0));
  EXPECT_EQ(placed().expert_rows(0), 1);
  map_[2] = map_[3] = 7;
  refused("routing_map: rank 0, token 1 has 2 experts; a token has at most topk, 1");
  map_[2] = 0;
  EXPECT_EQ(placed().expert_rows(1), 2);
  probs_[0] = std::nanf("");  // ignored: the map is 0 there
  EXPECT_NO_THROW(placed());
  probs_[3] = std::nanf("");
  refused("probs: rank 0, token 1, expert 1 is nan; probs must be finite");
  const int32_t ids[2] = {0, 1};
  routing_.topk_ids = ids;
  refused("routing_map: given beside topk_ids on rank 0; a routing is one of the two");
  routing_.routing_map = nullptr;
  probs_[0] = 0.5f;
  EXPECT_FALSE(placed().dense(0));
}

}  // namespace
}  // namespace uniep::test
