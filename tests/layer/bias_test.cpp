#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "support/c_layer.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"

// Experts' biases: how they are given, that no way of it changes a bit, and what is refused. The bits under random
// Schedules are bitwise_test's.
namespace uniep::test {
namespace {

// A layer with biases that random_layer() draws.
RandomLayer layer_with_biases(uint64_t seed) {
  for (;; ++seed) {
    RandomLayer layer =
        random_layer(seed, {.ranks = {2}, .most_local_experts = 6, .fewest_tokens = 4, .any_activation = true});
    if (layer.config.numerics.bias) return layer;
  }
}

Group cpu_group(int ranks) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = ranks;
  options.workers = 2;
  return Group(options);
}

Schedule chosen(const RandomLayer& layer, const Group& group, Direction direction) {
  return resolve(PartialSchedule(), {.direction = direction,
                                     .shape = layer.config.shape,
                                     .numerics = layer.config.numerics,
                                     .machine = group.machine()});
}

TEST(Biases, HowTheyAreGivenChangesNoBit) {
  for (uint64_t seed = 100; seed < 500; seed += 50) {
    const RandomLayer layer = layer_with_biases(seed);
    SCOPED_TRACE(layer.description);
    const cli::LayerResult expected = run_sequential(layer);
    ASSERT_EQ(expected.db2_bf16.size() + expected.db2_fp32.size(), layer.data.b2.size());
    const bool gated = is_gated(layer.config.numerics.activation);
    for (const cli::RunnerOptions& options :
         {cli::RunnerOptions{.by_address = true, .later = true}, cli::RunnerOptions{.apart = gated},
          cli::RunnerOptions{.by_address = true, .apart = gated}}) {
      Group group = cpu_group(layer.ranks);
      cli::LayerRunner runner(group, layer.config, layer.data, options);
      runner.forward(chosen(layer, group, Direction::kForward));
      runner.backward(chosen(layer, group, Direction::kBackward));
      EXPECT_EQ(difference(runner.result(), expected), "");
    }
  }
}

TEST(Biases, EachIsMadeWithItsWeight) {
  const RandomLayer layer = layer_with_biases(1);
  Group group = cpu_group(layer.ranks);
  LayerArrays arrays(layer);
  const Placement placement = place(group, layer.config.shape, arrays.routings);
  const Saved saved =
      forward(group, layer.config, chosen(layer, group, Direction::kForward), placement, arrays.forward_arguments());
  const PendingWeightGradients work = backward(group, layer.config, chosen(layer, group, Direction::kBackward), saved,
                                               arrays.backward_arguments(WeightGradientTime::kLater, false));
  weight_gradients(group, work, arrays.weight_gradient_arguments(false, true));
  const cli::LayerResult expected = arrays.expected(WeightGradientTime::kNow);
  const LayerArrays untouched(layer);
  cli::LayerResult half = expected;
  half.dw1_bf16 = untouched.result.dw1_bf16;
  half.dw1_fp32 = untouched.result.dw1_fp32;
  half.db1_bf16 = untouched.result.db1_bf16;
  half.db1_fp32 = untouched.result.db1_fp32;
  EXPECT_EQ(difference(arrays.result, half), "");
  std::vector<WeightGradientArguments> lacking = arrays.weight_gradient_arguments(true, false);
  lacking[1].gradients.db1 = nullptr;
  expect_error(Status::kInvalidArgument, "db1: null on rank 1", [&] { weight_gradients(group, work, lacking); });
  weight_gradients(group, work, arrays.weight_gradient_arguments(true, false));
  EXPECT_EQ(difference(arrays.result, expected), "");
}

// Nothing is added for an expert without rows: -0 and the payload of a NaN are still there.
TEST(Biases, MainGradOfAnExpertWithoutRowsStays) {
  RandomLayer layer = layer_with_biases(1);
  layer.config.numerics.weight_gradient = WeightGradient::kMainGrad;
  std::replace(layer.data.ids.begin(), layer.data.ids.end(), 0, -1);
  Group group = cpu_group(layer.ranks);
  LayerArrays arrays(layer);
  const Placement placement = place(group, layer.config.shape, arrays.routings);
  const Saved saved =
      forward(group, layer.config, chosen(layer, group, Direction::kForward), placement, arrays.forward_arguments());
  cli::LayerResult& result = arrays.result;
  const uint32_t held[] = {0x80000000u, 0x7f812345u};
  for (std::vector<float>* const gradient : {&result.dw1_fp32, &result.dw2_fp32, &result.db1_fp32, &result.db2_fp32}) {
    const std::size_t of_expert = gradient->size() / static_cast<std::size_t>(layer.config.shape.experts);
    for (std::size_t i = 0; i < of_expert; ++i) std::memcpy(&(*gradient)[i], &held[i % 2], sizeof(float));
  }
  backward(group, layer.config, chosen(layer, group, Direction::kBackward), saved,
           arrays.backward_arguments(WeightGradientTime::kNow, false));
  for (std::vector<float>* const gradient : {&result.dw1_fp32, &result.dw2_fp32, &result.db1_fp32, &result.db2_fp32}) {
    const std::size_t of_expert = gradient->size() / static_cast<std::size_t>(layer.config.shape.experts);
    for (std::size_t i = 0; i < of_expert; ++i) {
      ASSERT_EQ(std::memcmp(&(*gradient)[i], &held[i % 2], sizeof(float)), 0) << i << " of " << of_expert;
    }
  }
}

TEST(Biases, ANanOfThemIsOneNanInDprobs) {
  RandomLayer layer = layer_with_biases(1);
  layer.config.numerics.router_weight = RouterWeight::kOutput;
  std::fill(layer.data.b2.begin(), layer.data.b2.end(), BFloat16{0xffc1});
  Group group = cpu_group(layer.ranks);
  LayerArrays arrays(layer);
  const Placement placement = place(group, layer.config.shape, arrays.routings);
  const Saved saved =
      forward(group, layer.config, chosen(layer, group, Direction::kForward), placement, arrays.forward_arguments());
  backward(group, layer.config, chosen(layer, group, Direction::kBackward), saved,
           arrays.backward_arguments(WeightGradientTime::kNow, false));
  for (std::size_t entry = 0; entry < layer.data.ids.size(); ++entry) {
    uint32_t bits = 0;
    std::memcpy(&bits, &arrays.result.dprobs[entry], sizeof(bits));
    ASSERT_EQ(bits, layer.data.ids[entry] < 0 ? 0u : 0x7fc00000u) << entry;
  }
}

TEST(Biases, AreRefusedByName) {
  const RandomLayer layer = layer_with_biases(1);
  Group group = cpu_group(layer.ranks);
  LayerArrays arrays(layer);
  const LayerConfig& config = layer.config;
  const Placement placement = place(group, config.shape, arrays.routings);
  const Schedule schedule = chosen(layer, group, Direction::kForward);
  std::vector<ForwardArguments> arguments = arrays.forward_arguments();
  const auto refused = [&](const LayerConfig& given, const std::string& text) {
    expect_error(Status::kInvalidArgument, text, [&] { forward(group, given, schedule, placement, arguments); });
  };
  LayerConfig plain = config;
  plain.numerics.bias = false;
  refused(plain, "b2: given on rank 0; the layer has no biases (bias = 0)");
  arguments[1].weights.b1 = nullptr;
  refused(config, "b1: null on rank 1");
  std::vector<const BFloat16*> addresses(static_cast<std::size_t>(config.shape.experts / 2), layer.data.b1.data());
  addresses.back() = nullptr;
  arguments[1].weights.b1_experts = addresses.data();
  refused(config, fmt::format("b1: null for local expert {} on rank 1", addresses.size() - 1));
  arguments = arrays.forward_arguments();
  arguments[0].weights.b2 = nullptr;
  refused(config, "b2: null on rank 0");
  LayerConfig input = config;
  input.numerics.router_weight = RouterWeight::kInput;
  refused(input, "bias=1: not with router_weight=input; legal with activation and output");

  const Saved saved = forward(group, config, schedule, placement, arrays.forward_arguments());
  const Schedule backward_schedule = chosen(layer, group, Direction::kBackward);
  std::vector<BackwardArguments> backwards = arrays.backward_arguments(WeightGradientTime::kNow, false);
  const auto refused_backward = [&](const LayerConfig& given, const std::string& text) {
    expect_error(Status::kInvalidArgument, text, [&] { backward(group, given, backward_schedule, saved, backwards); });
  };
  refused_backward(plain, "bias: 0 in backward; that forward ran with 1");
  backwards[1].gradients.db2 = nullptr;
  refused_backward(config, "db2: null on rank 1");

  // Where there is no gate it is that which the verifier names.
  const bool gated = is_gated(config.numerics.activation);
  Verifier verifier(group, {.every = 1});
  expect_error(Status::kInvalidArgument, gated ? "verifier: bias=1 of layer 1" : "verifier: activation=", [&] {
    verifier.after_forward({"layer 1", config, schedule, arrays.routings}, arrays.forward_arguments(), saved);
  });
}

TEST(BiasesC, GiveTheBitsOfTheSequentialRun) {
  RandomLayer random = random_layer(7, {.ranks = {2}, .most_local_experts = 5, .fewest_tokens = 8});
  random.config.numerics.weight_gradient = WeightGradient::kFloat32;
  random.config.numerics.router_weight = RouterWeight::kOutput;
  random.config.numerics.bias = true;
  const LayerShape& shape = random.config.shape;
  Random draw(3);
  const auto values = [&](int64_t count) {
    std::vector<BFloat16> found(static_cast<std::size_t>(count));
    for (BFloat16& one : found) one.bits = static_cast<uint16_t>(0x3e00 + draw.between(0, 511));
    return found;
  };
  random.data.b1 = values(shape.experts * 2 * shape.intermediate);
  random.data.b2 = values(shape.experts * shape.hidden);
  CLayer layer(random);
  layer.config.router_weight = UNIEP_ROUTER_WEIGHT_OUTPUT;
  layer.config.bias = 1;
  layer.result.db1_fp32.resize(random.data.b1.size());
  layer.result.db2_fp32.resize(random.data.b2.size());
  std::vector<const void*> b1, b2;  // rank 1's, an address an expert
  std::vector<void*> db1, db2;
  const int64_t local = shape.experts / 2, columns = 2 * shape.intermediate;
  for (int64_t expert = local; expert < shape.experts; ++expert) {
    b1.push_back(random.data.b1.data() + expert * columns);
    b2.push_back(random.data.b2.data() + expert * shape.hidden);
    db1.push_back(layer.result.db1_fp32.data() + expert * columns);
    db2.push_back(layer.result.db2_fp32.data() + expert * shape.hidden);
  }
  layer.weights[0].b1 = random.data.b1.data();
  layer.weights[0].b2 = random.data.b2.data();
  layer.gradients[0].db1 = layer.result.db1_fp32.data();
  layer.gradients[0].db2 = layer.result.db2_fp32.data();
  layer.weights[1].b1_experts = b1.data();
  layer.weights[1].b2_experts = b2.data();
  layer.gradients[1].db1_experts = db1.data();
  layer.gradients[1].db2_experts = db2.data();
  const GroupHandle group = make_group(group_options(2));
  const PlacementHandle placement = layer.place(group.get());
  const SavedHandle saved = layer.forward(group.get(), placement.get(), "auto");
  ASSERT_NE(saved, nullptr);
  expect_ok(layer.backward(group.get(), saved.get(), "auto"));
  cli::LayerResult expected = run_sequential(random);
  expected.z.clear();
  EXPECT_EQ(difference(layer.result, expected), "");
  layer.config.bias = 2;
  expect_failure(UNIEP_INVALID_ARGUMENT, "bias: 2; legal are 0 and 1",
                 layer.backward(group.get(), saved.get(), "auto"));
}

}  // namespace
}  // namespace uniep::test
