#include <gtest/gtest.h>

#include "program/schedule_space.h"
#include "reference/check.h"
#include "support/branch_counts.h"
#include "support/environment.h"
#include "support/random_layer.h"

// The engine against the float64 reference, which shares no code with it, within the contract's limits.
namespace uniep::test {
namespace {

// main_grad did not start from zero: what the call added to it.
void subtract_start(std::vector<float>& gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] -= cli::start_main_grad(i);
}

TEST(EngineAgainstReference, RandomLayersAreWithinTheLimits) {
  BranchCounts branches;
  const uint64_t layers = from_environment("UNIEP_TEST_COMBINATIONS", 100);
  for (uint64_t seed = 1; seed <= layers; ++seed) {
    const RandomLayer layer = random_layer(seed, {.most_tokens = 40, .most_columns = 160, .any_activation = true});
    count_layer(branches, layer);
    count_activation(branches, layer.config.numerics);
    const LayerConfig& config = layer.config;
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = layer.ranks;
    options.workers = 2;
    Group group(options);
    const PartialSchedule keep = PartialSchedule::parse("save.xg=keep,save.z=keep");
    const Schedule forward = sample_legal(seed,
                                          {.direction = Direction::kForward,
                                           .shape = config.shape,
                                           .numerics = config.numerics,
                                           .machine = group.machine()},
                                          keep);
    const Schedule backward = sample_legal(seed,
                                           {.direction = Direction::kBackward,
                                            .shape = config.shape,
                                            .numerics = config.numerics,
                                            .machine = group.machine()},
                                           keep);
    cli::LayerResult result = run_layer(group, config, layer.data, forward, backward);
    if (config.numerics.weight_gradient == WeightGradient::kMainGrad) {
      subtract_start(result.dw1_fp32);
      subtract_start(result.dw2_fp32);
      subtract_start(result.db1_fp32);
      subtract_start(result.db2_fp32);
    }
    const bool bf16 = config.numerics.weight_gradient == WeightGradient::kBFloat16;
    reference::EngineOutput got;
    got.y = result.y.data();
    got.z = result.z.data();
    got.dx = result.dx.data();
    got.dprobs = result.dprobs.data();
    got.weight_gradient = config.numerics.weight_gradient;
    got.dw1 = bf16 ? static_cast<const void*>(result.dw1_bf16.data()) : result.dw1_fp32.data();
    got.dw2 = bf16 ? static_cast<const void*>(result.dw2_bf16.data()) : result.dw2_fp32.data();
    if (config.numerics.bias) {
      got.db1 = bf16 ? static_cast<const void*>(result.db1_bf16.data()) : result.db1_fp32.data();
      got.db2 = bf16 ? static_cast<const void*>(result.db2_bf16.data()) : result.db2_fp32.data();
    }
    reference::LayerInput input;
    input.shape = config.shape;
    input.numerics = config.numerics;
    input.tokens = layer.data.all_tokens();
    input.x = layer.data.x.data();
    input.dy = layer.data.dy.data();
    input.ids = layer.data.ids.data();
    input.probs = layer.data.probs.data();
    input.w1 = layer.data.w1.data();
    input.w2 = layer.data.w2.data();
    input.b1 = layer.data.b1.data();
    input.b2 = layer.data.b2.data();
    const reference::CheckReport report = reference::check(input, got);
    if (!result.z.empty()) {  // else there are fewer
      ASSERT_EQ(report.tensors.size(), config.numerics.bias ? 8u : 6u);
    }
    for (const auto& [name, comparison] : report.tensors) {
      EXPECT_TRUE(comparison.passed) << name << ": " << comparison.message << "\n" << layer.description;
    }
  }
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::test
