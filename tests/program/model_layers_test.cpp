#include <fmt/format.h>
#include <gtest/gtest.h>

#include "program/buildable.h"
#include "support/command.h"
#include "support/models.h"

// The layers of real models, and the limits of sizes: their default Schedules are legal and built on GPUs, and small
// layers of their form are right on the cpu engine. Their kernels: tests/cuda/schedule_kernels_test.cpp.
namespace uniep::test {
namespace {

// Forward and backward beside float64.
void expect_right(const Model& model, const LayerShape& shape, int ranks, int64_t tokens) {
  SCOPED_TRACE(
      fmt::format("{}: H {} I {} E {} K {}", model.name, shape.hidden, shape.intermediate, shape.experts, shape.topk));
  std::vector<std::string> arguments = {
      "run",
      "--engine",
      "cpu",
      "--ranks",
      std::to_string(ranks),
      "--tokens",
      std::to_string(tokens),
      "--shape",
      fmt::format("{},{},{},{}", shape.hidden, shape.intermediate, shape.experts, shape.topk),
      "--activation",
      model.activation,
      "--router-weight",
      router_weight_text(model.router_weight),
      "--backward",
      "--check",
      "--json",
      "-"};
  if (model.bias) arguments.emplace_back("--bias");
  const CommandResult result = run_command(arguments);
  ASSERT_EQ(result.status, 0) << result.err;
  const nlohmann::json check = result.json().at("check");
  EXPECT_EQ(check.size(), model.bias ? 8u : 6u) << check.dump();
  for (const auto& [name, tensor] : check.items()) EXPECT_TRUE(tensor.at("passed").get<bool>()) << name << tensor;
}

// A 32nd, with as many columns over a multiple of 64 as before, if any.
int64_t reduced(int64_t columns) {
  return std::max<int64_t>(columns / 32 / 64 * 64, 64) + columns % 64;
}

TEST(ModelLayers, DefaultSchedulesAreLegalAndBuiltOnEightGpus) {
  for (const Model& model : models()) {
    SCOPED_TRACE(model.name);
    const LayerConfig config = model.config();
    for (const bool processes : {false, true}) {
      const Machine machine{.engine = EngineKind::kCuda, .ranks = 8, .workers = 132, .processes = processes};
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        const ScheduleRequest request{
            .direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = machine};
        const Schedule schedule = resolve({}, request);
        EXPECT_EQ(validate(schedule, request), std::vector<std::string>());
        EXPECT_EQ(buildable(schedule, request), std::vector<std::string>());
      }
    }
  }
}

TEST(ModelLayers, AllExpertsAndSlotsWithFewerColumnsAreRight) {
  constexpr int kRanks = 8;
  constexpr int64_t kTokens = 32;  // so many that rows of dW with one token are few: those are the reference's worst
  for (const Model& model : models()) {
    LayerShape shape = model.shape;
    shape.hidden = reduced(shape.hidden);
    shape.intermediate = reduced(shape.intermediate);
    expect_right(model, shape, kRanks, kTokens);
  }
}

TEST(ModelLayers, AllColumnsWithFewExpertsAreRight) {
  constexpr int64_t kMostElements = 5'000'000;  // of an expert's matrix, for the reference's sake
  int run = 0;
  for (const Model& model : models()) {
    LayerShape shape = model.shape;
    if (shape.hidden * shape.intermediate > kMostElements) continue;
    shape.experts = 2;
    shape.topk = std::min<int64_t>(shape.topk, 2);
    expect_right(model, shape, 2, 2);
    ++run;
  }
  EXPECT_GE(run, 6);
}

}  // namespace
}  // namespace uniep::test
