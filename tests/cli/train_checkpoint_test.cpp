#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/file.h"
#include "io/safetensors_writer.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "train/checkpoint.h"
#include "train/compare.h"

namespace uniep::train {
namespace {

using test::expect_error;
using test::TemporaryFolder;

TrainConfig tiny_config() {
  TrainConfig config;
  config.model = {.hidden = 8, .intermediate = 8, .experts = 4, .topk = 2, .layers = 2, .sequence = 12};
  config.batch = 3;
  config.learning_rate = 0.003;
  return config;
}

ParallelConfig under(int ranks, const std::string& schedule = "auto") {
  ParallelConfig parallel;
  parallel.ranks = ranks;
  parallel.schedule = parallel.schedule_backward = PartialSchedule::parse(schedule);
  return parallel;
}

class Checkpoint : public testing::Test {
 protected:
  Checkpoint() {
    std::string bytes;
    for (int i = 0; i < 400; ++i) bytes += "line " + std::to_string(i * i) + "\n";
    io::write_file(folder_ / "text", bytes);
    text_ = load_text({folder_ / "text"});
  }

  RunRecord train_to(Trainer& trainer, int64_t steps) const {
    RunPlan plan;
    plan.steps = steps;
    return train(trainer, plan);
  }
  void save(const Trainer& trainer) const {
    save_checkpoint(path_, trainer.state(), trainer.layout(), trainer.config(), text_);
  }
  void resume(Trainer& trainer) const {
    trainer.restore(load_checkpoint(path_, trainer.layout(), trainer.config(), text_));
  }

  // The last steps of `whole` and all of `resumed` must be equal, and the weights.
  void expect_same_end(const RunRecord& whole, const Trainer& whole_trainer, const RunRecord& resumed,
                       const Trainer& resumed_trainer) const {
    RunRecord tail = whole;
    ASSERT_LE(resumed.steps.size(), whole.steps.size());
    tail.steps.erase(tail.steps.begin(), tail.steps.end() - static_cast<int64_t>(resumed.steps.size()));
    tail.evaluations = {whole.evaluations.back()};
    EXPECT_EQ(first_difference(tail, whole_trainer.parameters(), resumed, resumed_trainer.parameters()), "");
  }

  TemporaryFolder folder_;
  std::filesystem::path path_ = folder_ / "checkpoint.safetensors";
  Text text_;
};

TEST_F(Checkpoint, ResumesWithTheSameBitsOnOtherRanksAndSchedules) {
  constexpr int64_t kSteps = 9;
  Trainer whole(tiny_config(), under(2), text_);
  const RunRecord expected = train_to(whole, kSteps);
  std::mt19937 random(21);
  const ParallelConfig others[] = {under(2), under(1, "fusion=none"), under(4, "fusion=pairs")};
  for (const ParallelConfig& other : others) {
    const int64_t stop = 1 + static_cast<int64_t>(random() % (kSteps - 1));
    SCOPED_TRACE("stopped after step " + std::to_string(stop));
    {
      Trainer first(tiny_config(), under(2), text_);
      train_to(first, stop);
      save(first);
    }
    Trainer second(tiny_config(), other, text_);
    resume(second);
    EXPECT_EQ(second.steps_done(), stop);
    expect_same_end(expected, whole, train_to(second, kSteps), second);
  }
}

// Killed at an arbitrary moment while every step writes its checkpoint: what is found is whole, and goes on.
TEST_F(Checkpoint, SurvivesAKill) {
  for (int trial = 0; trial < 3; ++trial) {
    std::filesystem::remove(path_);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        Trainer trainer(tiny_config(), under(2), text_);
        RunPlan plan;
        plan.steps = 1000000;
        plan.after_step = [&](const Trainer& now) { save(now); };
        train(trainer, plan);
      } catch (...) {
      }
      _exit(1);
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!std::filesystem::exists(path_) && std::chrono::steady_clock::now() < deadline) usleep(1000);
    usleep(1000 * static_cast<useconds_t>(std::random_device{}() % 40));
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status)) << "the child ended by itself";

    Trainer resumed(tiny_config(), under(2), text_), whole(tiny_config(), under(2), text_);
    resume(resumed);
    const int64_t steps = resumed.steps_done() + 2;
    SCOPED_TRACE("killed after step " + std::to_string(steps - 2));
    const RunRecord record = train_to(resumed, steps);
    expect_same_end(train_to(whole, steps), whole, record, resumed);
  }
}

TEST_F(Checkpoint, RefusesAnotherConfigurationOrText) {
  Trainer trainer(tiny_config(), under(1), text_);
  save(trainer);
  const auto refused = [&](const std::string& message, auto change) {
    TrainConfig config = tiny_config();
    change(config);
    const ParameterLayout layout(config.model);
    expect_error(Status::kInvalidArgument, message, [&] { load_checkpoint(path_, layout, config, text_); });
  };
  refused("--hidden '8'; this run has 16", [](TrainConfig& c) { c.model.hidden = 16; });
  refused("--intermediate '8'; this run has 16", [](TrainConfig& c) { c.model.intermediate = 16; });
  refused("--experts '4'; this run has 8", [](TrainConfig& c) { c.model.experts = 8; });
  refused("--topk '2'; this run has 1", [](TrainConfig& c) { c.model.topk = 1; });
  refused("--layers '2'; this run has 3", [](TrainConfig& c) { c.model.layers = 3; });
  refused("--sequence '12'; this run has 13", [](TrainConfig& c) { c.model.sequence = 13; });
  refused("--batch '3'; this run has 4", [](TrainConfig& c) { c.batch = 4; });
  refused("--learning-rate '0.003'; this run has 0.004", [](TrainConfig& c) { c.learning_rate = 0.004; });
  refused("--balance-weight '0.01'; this run has 0", [](TrainConfig& c) { c.balance_weight = 0; });
  refused("--seed '1'; this run has 2", [](TrainConfig& c) { c.seed = 2; });
  Text other = text_;
  ++other.hash;
  expect_error(Status::kInvalidArgument, "another text",
               [&] { load_checkpoint(path_, trainer.layout(), trainer.config(), other); });
}

TEST_F(Checkpoint, RefusesWhatIsMissingForeignTruncatedOrDamaged) {
  Trainer trainer(tiny_config(), under(1), text_);
  const auto refused = [&](const std::string& message) {
    expect_error(Status::kInvalidArgument, message, [&] { resume(trainer); });
  };
  refused("does not exist");
  io::write_file(path_, "");
  refused("--resume");
  io::write_file(path_, "no safetensors file at all, just some text that is long enough for a header");
  refused("--resume");
  io::SafetensorsWriter foreign(path_, {{"weights", "F32", {0}}});
  foreign.commit();
  refused("no checkpoint of uniep train");

  train_to(trainer, 2);
  save(trainer);
  const std::string good = io::read_text_file(path_);
  std::mt19937 random(21);
  for (int trial = 0; trial < 20; ++trial) {
    io::write_file(path_, std::string_view(good).substr(0, random() % good.size()));
    refused("--resume");
  }
  uint64_t header = 0;
  std::memcpy(&header, good.data(), sizeof(header));
  for (int trial = 0; trial < 20; ++trial) {
    std::string bad = good;
    const std::size_t data = 8 + header;
    char& damaged = bad[data + random() % (bad.size() - data)];
    damaged = static_cast<char>(damaged ^ 1 << random() % 8);
    io::write_file(path_, bad);
    refused("damaged");
  }
  std::string bad = good;
  const std::size_t steps = bad.find("\"steps_done\":\"2\"");
  ASSERT_NE(steps, std::string::npos);
  bad[steps + 14] = '3';
  io::write_file(path_, bad);
  refused("damaged");
  bad[steps + 14] = '-';
  io::write_file(path_, bad);
  refused("steps_done is '-'");
  io::write_file(path_, good);
  resume(trainer);
  EXPECT_EQ(trainer.steps_done(), 2);
}

TEST_F(Checkpoint, AFailedWriteLeavesTheOldOne) {
  Trainer trainer(tiny_config(), under(1), text_);
  save(trainer);
  const std::string before = io::read_text_file(path_);
  train_to(trainer, 1);
  const std::filesystem::path full = "/dev/full";
  if (std::filesystem::exists(full)) {
    expect_error(Status::kIo, "/dev/full",
                 [&] { save_checkpoint(full, trainer.state(), trainer.layout(), trainer.config(), text_); });
  }
  EXPECT_EQ(io::read_text_file(path_), before);
  save(trainer);
  EXPECT_NE(io::read_text_file(path_), before);
  EXPECT_EQ(folder_.entries(), 2u) << "text and checkpoint, no temporary file";
}

}  // namespace
}  // namespace uniep::train
