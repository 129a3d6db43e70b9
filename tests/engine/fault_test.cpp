#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "engine/cpu/engine.h"
#include "model/elementwise.h"
#include "support/disturb.h"
#include "support/processes.h"
#include "support/random_layer.h"

// Faults planted in the engine, and that the bitwise test (or the bounded wait) catches each of them, every time.
namespace uniep::test {
namespace {

struct Planted {
  const char* name;
  cpu::Fault fault;
  const char* schedule;
};

// What a run with the fault gave other than the right bits (a difference, or an error, after which the group must
// recover); empty when the fault went unnoticed in all rounds. Every round has its own interleaving, every other one
// workers in pairs.
std::string run_with(cpu::Fault fault, const RandomLayer& layer, const std::string& text, int rounds,
                     uint64_t first_shuffle = 1) {
  const LayerConfig& config = layer.config;
  const cli::LayerResult expected = run_sequential(layer);
  for (int round = 0; round < rounds; ++round) {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = layer.ranks;
    options.workers = 2;
    options.timeout_seconds = 1;
    Group group(options);
    disturb(group, {.shuffle_seed = first_shuffle + round});
    cpu::CpuEngine& engine = dynamic_cast<cpu::CpuEngine&>(group.implementation());
    engine.plant(fault);
    const auto schedule = [&](Direction direction) {
      return resolve(
          PartialSchedule::parse(text),
          {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = group.machine()});
    };
    const auto run = [&] {
      return difference(
          run_layer(group, config, layer.data, schedule(Direction::kForward), schedule(Direction::kBackward)),
          expected);
    };
    try {
      std::string problem = run();
      if (!problem.empty()) return problem;
    } catch (const Error& error) {
      engine.plant(cpu::Fault::kNone);
      group.recover();
      EXPECT_EQ(run(), "") << "after recovery";
      return error.what();
    }
  }
  return "";
}

// Room for a fault to show: several slots a token, padding, several column tiles. All experts have the same weights and
// the probs nearly cancel, so that a sum's order shows in its bits.
RandomLayer layer_with(uint64_t seed) {
  Random random(seed);
  RandomLayer layer = random_layer(seed, {.ranks = {2}});
  layer.ranks = random.one_in(2) ? 2 : 4;
  layer.config = {};
  layer.config.shape = {8 * random.between(4, 20), 8 * random.between(10, 20),
                        layer.ranks * random.between(4 / layer.ranks, 4), 4};
  cli::LayerData& data = layer.data;
  const LayerShape& shape = data.shape = layer.config.shape;
  data.tokens.clear();
  data.ids.clear();
  data.probs.clear();
  for (int rank = 0; rank < layer.ranks; ++rank) data.tokens.push_back(random.between(20, 40));
  const int64_t tokens = data.all_tokens();
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t first = random.between(0, shape.experts - 1);
    const float probs[] = {1.0f, 1e-6f * static_cast<float>(1 + token % 7), -1.0f, 2e-6f};
    for (int64_t slot = 0; slot < 4; ++slot) {
      data.ids.push_back(static_cast<int32_t>((first + slot) % shape.experts));
      data.probs.push_back(probs[slot]);
    }
  }
  const auto fill = [&](std::vector<BFloat16>& values, int64_t count, int64_t period, float scale) {
    values.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      values[i] = i < period ? to_bfloat16(static_cast<float>(random.unit() - 0.5) * scale) : values[i - period];
    }
  };
  fill(data.x, tokens * shape.hidden, tokens * shape.hidden, 4.0f);
  fill(data.dy, tokens * shape.hidden, tokens * shape.hidden, 4.0f);
  fill(data.w1, shape.experts * 2 * shape.intermediate * shape.hidden, 2 * shape.intermediate * shape.hidden, 0.5f);
  fill(data.w2, shape.experts * shape.intermediate * shape.hidden, shape.intermediate * shape.hidden, 0.5f);
  return layer;
}

class FaultTest : public testing::TestWithParam<Planted> {};

TEST_P(FaultTest, IsCaughtEveryTime) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    const RandomLayer layer = layer_with(seed);
    EXPECT_EQ(run_with(cpu::Fault::kNone, layer, GetParam().schedule, 1, seed), "");
    EXPECT_NE(run_with(GetParam().fault, layer, GetParam().schedule, 200, seed), "") << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Planted, FaultTest,
    testing::Values(Planted{"WrongOffset", cpu::Fault::kWrongOffset, "fusion=layer"},
                    Planted{"MissingWait", cpu::Fault::kMissingWait, "fusion=layer"},
                    Planted{"SwappedThreshold", cpu::Fault::kSwappedThreshold, "fusion=layer"},
                    Planted{"ReorderedSum", cpu::Fault::kReorderedSum, "fusion=layer"},
                    Planted{"SkippedPadding", cpu::Fault::kSkippedPadding, "fusion=layer"},
                    Planted{"StaleEpoch", cpu::Fault::kStaleEpoch, "fusion=layer"},
                    Planted{"EarlyFlag", cpu::Fault::kEarlyFlag, "fusion=layer,combine.transport=staged"},
                    Planted{"LateProbOfTheEpilogue", cpu::Fault::kLateProb, "combine.transport=epilogue"},
                    Planted{"LateProbOfASend", cpu::Fault::kLateProb, "combine.transport=staged"},
                    Planted{"SilentWorker", cpu::Fault::kSilentWorker, "fusion=layer,order.interleave=phased"}),
    [](const testing::TestParamInfo<Planted>& planted) { return planted.param.name; });

TEST(BoundedWait, SaysWhoWaitedForWhatAndTheGroupRecovers) {
  const RandomLayer layer = layer_with(105);
  const auto begin = std::chrono::steady_clock::now();
  const std::string text = run_with(cpu::Fault::kSilentWorker, layer, "fusion=layer", 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  for (const char* part : {"time-out after 1 s: rank", "waits for", "expected", "seen", "tile (expert"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
}

TEST(BoundedWait, ABrokenGroupRefusesCallsUntilItRecovers) {
  const RandomLayer layer = layer_with(100);
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  options.timeout_seconds = 0.2;
  Group group(options);
  cpu::CpuEngine& engine = dynamic_cast<cpu::CpuEngine&>(group.implementation());
  engine.plant(cpu::Fault::kSilentWorker);
  cli::LayerRunner runner(group, layer.config, layer.data);
  const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                         .shape = layer.config.shape,
                                         .numerics = layer.config.numerics,
                                         .machine = group.machine()});
  EXPECT_THROW(runner.forward(schedule), Error);
  engine.plant(cpu::Fault::kNone);
  try {
    runner.forward(schedule);
    FAIL() << "a half-finished call must not be followed by another";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("recover()"), std::string::npos);
  }
  group.recover();
  runner.forward(schedule);
}

// Its clock goes on, but nobody has waited.
TEST(BoundedWait, AProcessThatWasStoppedGoesOn) {
  Process process([](const Reporter& reporter) {
    const RandomLayer layer = layer_with(100);
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = layer.ranks;
    options.timeout_seconds = 0.2;
    Group group(options);
    cli::LayerRunner runner(group, layer.config, layer.data);
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = layer.config.shape,
                                           .numerics = layer.config.numerics,
                                           .machine = group.machine()});
    reporter.line("begins");
    const double begin = monotonic_seconds();
    reporter.line(reporter.error_of([&] {
      while (monotonic_seconds() < begin + 4) runner.forward(schedule);
    }));
  });
  ASSERT_EQ(process.line(), "begins");
  for (int stop = 0; stop < 6; ++stop) {
    process.signal(SIGSTOP);
    ::usleep(400'000);
    process.signal(SIGCONT);
    ::usleep(50'000);
  }
  EXPECT_EQ(process.line(), "none");
}

}  // namespace
}  // namespace uniep::test
