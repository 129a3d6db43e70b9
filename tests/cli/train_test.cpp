#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "io/file.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "train/adamw.h"
#include "train/compare.h"
#include "train/text.h"
#include "train/trainer.h"

// The text, the optimizer, and that no bit of a training depends on ranks, workers or Schedules.
namespace uniep::train {
namespace {

using test::expect_error;
using test::TemporaryFolder;

// Words in random order: there is structure to learn, and no end to it.
std::string synthetic_text(std::size_t bytes) {
  std::mt19937 random(11);
  const char* const words[] = {"expert ", "token ", "rank ", "layer ", "the ", "of ", "a "};
  std::string text;
  while (text.size() < bytes) text += words[random() % std::size(words)];
  return text;
}

Text make_text(const TemporaryFolder& folder, std::size_t bytes = 4000) {
  io::write_file(folder / "text", synthetic_text(bytes));
  return load_text({folder / "text"});
}

TrainConfig small_config() {
  TrainConfig config;
  config.model = {.hidden = 16, .intermediate = 8, .experts = 8, .topk = 2, .layers = 2, .sequence = 24};
  config.batch = 6;
  return config;
}

ParallelConfig on_ranks(int ranks, const std::string& forward = "auto", const std::string& backward = "") {
  ParallelConfig parallel;
  parallel.ranks = ranks;
  parallel.schedule = PartialSchedule::parse(forward);
  parallel.schedule_backward = PartialSchedule::parse(backward.empty() ? forward : backward);
  return parallel;
}

RunRecord train_steps(Trainer& trainer, int64_t steps) {
  RunPlan plan;
  plan.steps = steps;
  plan.evaluate_every = 2;
  return train(trainer, plan);
}

TEST(TrainText, HoldsOutTheLastTenthOfEachFile) {
  const TemporaryFolder folder;
  io::write_file(folder / "a", std::string(90, 'a') + std::string(10, 'A'));
  io::write_file(folder / "b", std::string(19, 'b') + "B");
  const Text text = load_text({folder / "a", folder / "b"});
  EXPECT_EQ(std::string(text.training.begin(), text.training.end()), std::string(90, 'a') + std::string(18, 'b'));
  EXPECT_EQ(std::string(text.held_out.begin(), text.held_out.end()), std::string(10, 'A') + "bB");
  EXPECT_NE(text.hash, load_text({folder / "b", folder / "a"}).hash);
}

TEST(TrainText, WindowsStayInsideAndVary) {
  Text text;
  text.training.resize(40);
  text.held_out.resize(33);
  for (const int64_t sequence : {1, 7, 32}) {
    std::vector<int> training_hits(text.training.size()), held_out_hits(text.held_out.size());
    for (int64_t index = 0; index < 2000; ++index) {
      const int64_t begin = text.training_window(sequence, 5, 1 + index / 10, index % 10) - text.training.data();
      ASSERT_GE(begin, 0);
      ASSERT_LE(begin + sequence + 1, 40);
      ++training_hits[begin];
      const int64_t held_out = text.held_out_window(sequence, index, 2000) - text.held_out.data();
      ASSERT_GE(held_out, 0);
      ASSERT_LE(held_out + sequence + 1, 33);
      ++held_out_hits[held_out];
    }
    const auto hit = [](int hits) { return hits > 0; };
    EXPECT_EQ(std::count_if(training_hits.begin(), training_hits.end(), hit), 40 - sequence);
    EXPECT_EQ(std::count_if(held_out_hits.begin(), held_out_hits.end(), hit), 33 - sequence);
  }
  EXPECT_EQ(text.training_window(7, 1, 2, 3), text.training_window(7, 1, 2, 3));
}

TEST(TrainText, RefusesWhatCanNotBeTrainedOn) {
  const TemporaryFolder folder;
  io::write_file(folder / "empty", "");
  io::write_file(folder / "short", "0123456789012345678901234567890123456789");
  expect_error(Status::kInvalidArgument, "does not exist", [&] { load_text({folder / "missing"}); });
  expect_error(Status::kInvalidArgument, "empty", [&] { load_text({folder / "empty"}); });
  expect_error(Status::kInvalidArgument, "folder", [&] { load_text({folder.path()}); });
  const Text text = load_text({folder / "short"});  // 36 bytes and 4
  text.check_window(3);
  expect_error(Status::kInvalidArgument, "--sequence 4 needs 5", [&] { text.check_window(4); });
}

TEST(TrainAdamW, FollowsItsFormulas) {
  const ParameterLayout layout({.hidden = 8, .intermediate = 8, .experts = 2, .topk = 1, .layers = 1, .sequence = 8});
  AdamW optimizer(layout);
  std::mt19937 random(12);
  std::normal_distribution<float> normal;
  std::vector<float> values(layout.count(), 0.5f), gradients(layout.count());
  std::vector<double> expected(values.begin(), values.end()), first(layout.count()), second(layout.count());
  for (int64_t step = 1; step <= 5; ++step) {
    const double magnitude = step == 2 ? 1e-4 : 1;  // once a norm below the limit
    double square = 0;
    for (float& gradient : gradients) {
      gradient = normal(random) * static_cast<float>(magnitude);
      square += static_cast<double>(gradient) * gradient;
    }
    const double rate = 0.01 * static_cast<double>(step);
    EXPECT_NEAR(optimizer.update(step, rate, gradients, values), std::sqrt(square), 1e-6 * std::sqrt(square));
    for (const ParameterTensor& tensor : layout.tensors()) {
      for (int64_t i = tensor.offset; i < tensor.offset + tensor.count; ++i) {
        const double gradient = gradients[i] * std::min(1.0, 1 / std::sqrt(square));
        first[i] = 0.9 * first[i] + 0.1 * gradient;
        second[i] = 0.95 * second[i] + 0.05 * gradient * gradient;
        const double mean = first[i] / (1 - std::pow(0.9, step)), variance = second[i] / (1 - std::pow(0.95, step));
        expected[i] -= rate * (mean / (std::sqrt(variance) + 1e-8) + (tensor.decays ? 0.1 * expected[i] : 0.0));
        ASSERT_NEAR(values[i], expected[i], 1e-4) << tensor.name << " step " << step;
      }
    }
  }
  const std::vector<float> before = values;
  gradients[17] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(optimizer.update(6, 0.01, gradients, values)));
  EXPECT_EQ(values, before);
}

TEST(Train, LossFallsOnTrainingAndHeldOutText) {
  const TemporaryFolder folder;
  const Text text = make_text(folder, 20000);
  Trainer trainer(small_config(), on_ranks(2), text);
  const RunRecord record = train_steps(trainer, 120);
  EXPECT_NEAR(record.evaluations.front().loss, std::log(256.0), 0.3);  // it begins by knowing nothing
  EXPECT_LT(record.steps.back().loss, 1.0);                            // a word in seven: about 0.45 nats a byte
  EXPECT_LT(record.evaluations.back().loss, 1.0);
  for (const StepRecord& step : record.steps) EXPECT_GT(step.balance_loss, 0.9);  // 1 when balanced
}

// Ragged batches and ranks without a sequence are among them.
TEST(Train, BitsDependOnNeitherRanksNorSchedule) {
  const char* const schedules[][2] = {
      {"auto", ""},
      {"fusion=none", ""},
      {"fusion=pairs,dispatch.transport=push,queue=dynamic", ""},
      {"fusion=layer,combine.transport=staged,order.interleave=phased", ""},
      {"comm.where=sms", "fusion=pairs,backward.wgrad=after"},
      {"save.xg=redispatch,dispatch.dedup=off", ""},
      {"save.z=recompute", ""},
      {"save.xg=redispatch,save.z=recompute", "fusion=none,save.xg=redispatch,save.z=recompute"}};
  const TemporaryFolder folder;
  const Text text = make_text(folder);
  for (const int64_t batch : {1, 3, 6}) {
    TrainConfig config = small_config();
    config.batch = batch;
    Trainer reference(config, on_ranks(1, "fusion=none"), text);
    const RunRecord expected = train_steps(reference, 4);
    for (const int ranks : {1, 2, 4}) {
      for (const auto& [forward, backward] : schedules) {
        Trainer trainer(config, on_ranks(ranks, forward, backward), text);
        const RunRecord record = train_steps(trainer, 4);
        EXPECT_EQ(first_difference(expected, reference.parameters(), record, trainer.parameters()), "")
            << "batch " << batch << ", " << ranks << " ranks, " << forward;
      }
    }
  }
}

TEST(Train, SeedAndLearningRateChangeTheBits) {
  const TemporaryFolder folder;
  const Text text = make_text(folder);
  const TrainConfig config = small_config();
  TrainConfig other_seed = config, other_rate = config;
  other_seed.seed = 2;
  other_rate.learning_rate *= 0.5;
  Trainer reference(config, on_ranks(1), text), seed(other_seed, on_ranks(1), text),
      rate(other_rate, on_ranks(1), text);
  const RunRecord expected = train_steps(reference, 3);
  EXPECT_NE(first_difference(expected, reference.parameters(), train_steps(seed, 3), seed.parameters()), "");
  EXPECT_NE(first_difference(expected, reference.parameters(), train_steps(rate, 3), rate.parameters()), "");
}

TEST(Train, EvaluationLeavesTheTrainingAlone) {
  const TemporaryFolder folder;
  const Text text = make_text(folder);
  Trainer often(small_config(), on_ranks(2), text), never(small_config(), on_ranks(2), text);
  RunPlan plan;
  plan.steps = 4;
  RunRecord rare_record = train(never, plan);
  plan.evaluate_every = 1;
  RunRecord often_record = train(often, plan);
  EXPECT_EQ(often_record.evaluations.size(), 5u);
  EXPECT_EQ(rare_record.evaluations.size(), 2u);
  often_record.evaluations = rare_record.evaluations;
  EXPECT_EQ(first_difference(rare_record, never.parameters(), often_record, often.parameters()), "");
}

TEST(Train, DivergenceIsReportedAndLeavesTheStateOfTheStepBefore) {
  const TemporaryFolder folder;
  const Text text = make_text(folder);
  Trainer trainer(small_config(), on_ranks(2), text);
  train_steps(trainer, 2);
  for (const ParameterTensor& tensor : trainer.layout().tensors()) {
    if (tensor.name == "embedding") continue;  // NaN in a row that no byte uses does no harm
    TrainState state = trainer.state();
    state.values[tensor.offset] = std::numeric_limits<float>::quiet_NaN();
    Trainer broken(small_config(), on_ranks(2), text);
    broken.restore(state);
    try {
      broken.step();
      ADD_FAILURE() << "no error for a NaN in " << tensor.name;
    } catch (const Error& error) {
      ADD_FAILURE() << "divergence is no bad input: " << error.what();
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find("diverged"), std::string::npos) << error.what();
    }
    EXPECT_EQ(broken.steps_done(), 2);
    EXPECT_EQ(std::memcmp(broken.state().values.data(), state.values.data(), state.values.size() * sizeof(float)), 0);
  }
}

TEST(TrainCompare, NamesTheFirstDifference) {
  const TemporaryFolder folder;
  const Text text = make_text(folder);
  Trainer trainer(small_config(), on_ranks(1), text), other(small_config(), on_ranks(1), text);
  const RunRecord record = train_steps(trainer, 3);
  other.restore(trainer.state());
  const auto difference = [&](const RunRecord& changed) {
    return first_difference(record, trainer.parameters(), changed, other.parameters());
  };
  EXPECT_EQ(difference(record), "");
  RunRecord changed = record;
  changed.steps[2].loss = std::nextafter(changed.steps[2].loss, 10);
  changed.steps[1].balance_loss = std::nextafter(changed.steps[1].balance_loss, 10);
  EXPECT_EQ(difference(changed).rfind("step 2: balancing loss ", 0), 0u);
  changed = record;
  changed.steps[0].tokens_per_second += 1;
  EXPECT_EQ(difference(changed), "");
  changed.evaluations.back().loss = std::nextafter(changed.evaluations.back().loss, 10);
  EXPECT_EQ(difference(changed).rfind("held-out loss after step 3: ", 0), 0u);
  TrainState state = trainer.state();
  const ParameterTensor& tensor = trainer.layout().tensors().back();
  state.values[tensor.offset + 5] = std::nextafter(state.values[tensor.offset + 5], 10.0f);
  other.restore(state);
  EXPECT_EQ(difference(record).rfind("weights " + tensor.name + ": element 5 ", 0), 0u);
}

TEST(TrainConfigCheck, NamesWhatIsNotLegal) {
  const auto refused = [](const std::string& message, auto change) {
    TrainConfig config = small_config();
    ParallelConfig parallel = on_ranks(1);
    change(config, parallel);
    expect_error(Status::kInvalidArgument, message, [&] { check(config, parallel); });
  };
  refused("--ranks: 0", [](TrainConfig&, ParallelConfig& p) { p.ranks = 0; });
  refused("--ranks: 65", [](TrainConfig&, ParallelConfig& p) { p.ranks = 65; });
  refused("--experts: 8 can not be divided evenly over 3 ranks", [](TrainConfig&, ParallelConfig& p) { p.ranks = 3; });
  refused("--workers: -1", [](TrainConfig&, ParallelConfig& p) { p.workers = -1; });
  refused("--hidden: 12", [](TrainConfig& c, ParallelConfig&) { c.model.hidden = 12; });
  refused("--intermediate: 0", [](TrainConfig& c, ParallelConfig&) { c.model.intermediate = 0; });
  refused("--topk: 9", [](TrainConfig& c, ParallelConfig&) { c.model.topk = 9; });
  refused("--topk: 0", [](TrainConfig& c, ParallelConfig&) { c.model.topk = 0; });
  refused("--layers: 0", [](TrainConfig& c, ParallelConfig&) { c.model.layers = 0; });
  refused("--sequence: 0", [](TrainConfig& c, ParallelConfig&) { c.model.sequence = 0; });
  refused("--batch: 0", [](TrainConfig& c, ParallelConfig&) { c.batch = 0; });
  refused("--learning-rate: nan", [](TrainConfig& c, ParallelConfig&) { c.learning_rate = NAN; });
  refused("--learning-rate: -1", [](TrainConfig& c, ParallelConfig&) { c.learning_rate = -1; });
  refused("--balance-weight: inf", [](TrainConfig& c, ParallelConfig&) { c.balance_weight = INFINITY; });
  refused("--batch: 65536", [](TrainConfig& c, ParallelConfig&) {
    c.batch = 65536;
    c.model.sequence = 65536;
  });
  refused("too large", [](TrainConfig& c, ParallelConfig&) {
    c.model.hidden = c.model.intermediate = 8192;
    c.model.experts = 4096;
  });
}

}  // namespace
}  // namespace uniep::train
