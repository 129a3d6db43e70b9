#include "cli/train_command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engine/cuda/calls/engine.h"
#include "io/file.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "train/checkpoint.h"
#include "train/report.h"
#include "train/text.h"

namespace uniep {
namespace {

using nlohmann::json;
using test::expect_error;
using test::TemporaryFolder;

// `uniep train` with these arguments: its exit status, and what it prints on stdout.
struct Outcome {
  int status = -1;
  std::string out;
};

Outcome run_train(std::vector<std::string> arguments) {
  CLI::App app;
  std::function<int()> action;
  cli::add_train_command(app, action);
  arguments.insert(arguments.begin(), "train");
  std::reverse(arguments.begin(), arguments.end());
  app.parse(arguments);
  std::ostringstream out;
  std::streambuf* const own = std::cout.rdbuf(out.rdbuf());
  Outcome outcome;
  try {
    outcome.status = action();
  } catch (...) {
    std::cout.rdbuf(own);
    throw;
  }
  std::cout.rdbuf(own);
  outcome.out = out.str();
  return outcome;
}

class TrainCommand : public testing::Test {
 protected:
  TrainCommand() {
    std::string text;
    for (int i = 0; i < 300; ++i) text += "number " + std::to_string(i * 7) + " follows. ";
    io::write_file(folder_ / "text", text);
  }

  // A tiny run, but for what `more` says.
  std::vector<std::string> tiny(const std::vector<std::string>& more = {}) const {
    const std::pair<const char*, std::string> defaults[] = {
        {"--text", path("text")}, {"--ranks", "2"},  {"--steps", "4"},        {"--batch", "3"},  {"--sequence", "8"},
        {"--hidden", "8"},        {"--layers", "2"}, {"--intermediate", "8"}, {"--experts", "4"}};
    std::vector<std::string> arguments = more;
    for (const auto& [option, value] : defaults) {
      if (std::find(more.begin(), more.end(), option) == more.end()) arguments.insert(arguments.end(), {option, value});
    }
    return arguments;
  }
  json run_json(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = tiny(more);
    arguments.insert(arguments.end(), {"--json", "-"});
    const Outcome outcome = run_train(arguments);
    EXPECT_EQ(outcome.status, 0);
    return json::parse(outcome.out);  // throws when anything else stands there
  }
  void refused(const std::string& message, const std::vector<std::string>& more) const {
    expect_error(Status::kInvalidArgument, message, [&] { run_train(tiny(more)); });
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  TemporaryFolder folder_;
};

// A tuner that tries all the time changes what runs, and no bit of what is learnt.
TEST_F(TrainCommand, TuningOnlineChangesNoBit) {
  const std::vector<std::string> plain = {"--steps", "30", "--layers", "4", "--evaluate-every", "10"};
  std::vector<std::string> tuned = plain;
  tuned.insert(tuned.end(), {"--tune", "online", "--tune-budget", "1"});
  const json without = run_json(plain), with = run_json(tuned);
  EXPECT_EQ(with["weights_checksum"], without["weights_checksum"]);
  EXPECT_EQ(with["evaluations"], without["evaluations"]);
  ASSERT_EQ(with["steps"].size(), 30u);
  for (std::size_t i = 0; i < with["steps"].size(); ++i) {
    EXPECT_EQ(with["steps"][i]["loss"], without["steps"][i]["loss"]) << "step " << i + 1;
    EXPECT_EQ(with["steps"][i]["balance_loss"], without["steps"][i]["balance_loss"]) << "step " << i + 1;
    EXPECT_GT(with["steps"][i]["layer_ms"], 0);
  }
  EXPECT_FALSE(without.contains("tuning"));
  // Something else did run: what that found is this machine's.
  EXPECT_GT(with["tuning"]["tried_calls"], 0);
  EXPECT_GT(with["tuning"]["layers_ms"], with["tuning"]["lost_ms"]);
}

// Checks of candidates count as lost time; on a busy machine it takes more steps until layers have paid for them.
TEST_F(TrainCommand, TuningOnlineOnSixtyFourRanksChangesNoBit) {
  int tried = 0;
  for (int steps = 16; tried == 0; steps *= 2) {
    ASSERT_LE(steps, 1024) << "nothing was tried";
    const std::vector<std::string> plain = {"--ranks", "64", "--workers",  "1", "--experts", "64",
                                            "--batch", "64", "--sequence", "4", "--steps",   std::to_string(steps)};
    std::vector<std::string> tuned = plain;
    tuned.insert(tuned.end(), {"--tune", "online", "--tune-budget", "1"});
    const json without = run_json(plain), with = run_json(tuned);
    EXPECT_EQ(with["ranks"], 64);
    EXPECT_EQ(with["weights_checksum"], without["weights_checksum"]);
    EXPECT_EQ(with["evaluations"], without["evaluations"]);
    tried = with["tuning"]["tried_calls"];
  }
}

TEST_F(TrainCommand, TuningOptionsAreChecked) {
  const auto refused = [&](const std::vector<std::string>& more, const std::string& text) {
    expect_error(Status::kInvalidArgument, text, [&] { run_train(tiny(more)); });
  };
  refused({"--tune-until", "5"}, "--tune-until: without --tune online");
  refused({"--tune-budget", "0.1"}, "--tune-budget: without --tune online");
  refused({"--tune", "online", "--tune-budget", "2"}, "--tune-budget: 2; legal are 0 to 1");
}

TEST_F(TrainCommand, WritesTheWholeLogAsJson) {
  const json log = run_json({"--compare", "sequential", "--evaluate-every", "2", "--schedule", "fusion=pairs",
                             "--schedule-backward", "backward.wgrad=after"});
  EXPECT_EQ(log["engine"], "cpu");
  EXPECT_EQ(log["ranks"], 2);
  EXPECT_EQ(log["shape"], json({{"hidden", 8}, {"intermediate", 8}, {"experts", 4}, {"topk", 2}}));
  EXPECT_EQ(log["schedule"]["fusion"], "pairs");
  EXPECT_EQ(log["schedule_backward"]["fusion"], "pairs");
  EXPECT_EQ(log["schedule_backward"]["backward.wgrad"], "after");
  ASSERT_EQ(log["steps"].size(), 4u);
  for (int step = 1; step <= 4; ++step) {
    const json& entry = log["steps"][step - 1];
    EXPECT_EQ(entry["step"], step);
    EXPECT_GT(entry["loss"], 1.0);
    EXPECT_GT(entry["balance_loss"], 0.5);
    EXPECT_GT(entry["tokens_per_second"], 0.0);
  }
  ASSERT_EQ(log["evaluations"].size(), 3u);
  EXPECT_EQ(log["evaluations"][1]["step"], 2);
  ASSERT_EQ(log["comparisons"].size(), 2u);
  EXPECT_EQ(log["comparisons"][0]["ranks"], 2);
  EXPECT_EQ(log["comparisons"][1]["ranks"], 1);
  for (const json& comparison : log["comparisons"]) EXPECT_EQ(comparison["equal"], true) << comparison;
}

TEST_F(TrainCommand, ChecksumsAreThoseOfOneRank) {
  const json two = run_json({}), one = run_json({"--ranks", "1"});
  EXPECT_EQ(two["weights_checksum"], one["weights_checksum"]);
  EXPECT_NE(two["weights_checksum"], run_json({"--seed", "2"})["weights_checksum"]);
}

TEST_F(TrainCommand, BiasesAreTrainedWithTheSameBitsOnAnyNumberOfRanks) {
  const json two = run_json({"--bias", "--router-weight", "output"});
  const json one = run_json({"--bias", "--router-weight", "output", "--ranks", "1"});
  EXPECT_EQ(two["model"]["bias"], true);
  EXPECT_EQ(two["weights_checksum"], one["weights_checksum"]);
  EXPECT_GT(two["model"]["parameters"], run_json({})["model"]["parameters"]);
  refused("--verify: beside --bias", {"--bias", "--verify", "1"});
}

TEST_F(TrainCommand, VerifyingChangesNoLoss) {
  const json with = run_json({"--verify", "1", "--evaluate-every", "2"}), without = run_json({"--evaluate-every", "2"});
  EXPECT_EQ(with["verify"]["checks"], 4);
  EXPECT_TRUE(with["verify"]["findings"].empty());
  EXPECT_FALSE(without.contains("verify"));
  EXPECT_EQ(with["weights_checksum"], without["weights_checksum"]);
  for (std::size_t step = 0; step < with["steps"].size(); ++step) {
    EXPECT_EQ(with["steps"][step]["loss"], without["steps"][step]["loss"]);
  }
  refused("--verify: '-1'", {"--verify", "-1"});
}

TEST_F(TrainCommand, DevicesNeedTheirEngine) {
  refused("--devices", {"--devices", "0"});
  refused("--engine", {"--engine", "gpu"});
}

TEST_F(TrainCommand, OnGpusEveryScheduleAndNumberOfRanksGivesTheSameBits) {
  const std::vector<std::string> more = {
      "--engine", "cuda",      "--hidden",   "64",         "--intermediate",
      "72",       "--compare", "sequential", "--schedule", "fusion=pairs,dispatch.transport=pull"};
  if (!cuda::has_hopper_gpu()) GTEST_SKIP() << "no Hopper GPU";
  const json log = run_json(more);
  EXPECT_EQ(log["engine"], "cuda");
  for (const json& comparison : log["comparisons"]) EXPECT_EQ(comparison["equal"], true) << comparison;
  // The CPU's bits are others, its losses nearly the same.
  const json on_cpu = run_json({"--hidden", "64", "--intermediate", "72"});
  for (std::size_t step = 0; step < on_cpu["steps"].size(); ++step) {
    EXPECT_NEAR(log["steps"][step]["loss"].get<double>(), on_cpu["steps"][step]["loss"].get<double>(), 0.02);
  }
}

TEST_F(TrainCommand, ResumesFromACheckpoint) {
  const json whole = run_json({"--steps", "6"});
  run_json({"--steps", "4", "--checkpoint", path("check")});
  const json rest = run_json({"--steps", "6", "--resume", path("check"), "--checkpoint", path("check"),
                              "--checkpoint-every", "1", "--compare", "sequential", "--ranks", "4"});
  EXPECT_EQ(rest["training"]["resumed_after_step"], 4);
  ASSERT_EQ(rest["steps"].size(), 2u);
  EXPECT_EQ(rest["steps"][1]["loss"], whole["steps"][5]["loss"]);
  EXPECT_EQ(rest["weights_checksum"], whole["weights_checksum"]);
  EXPECT_EQ(rest["comparisons"][1]["equal"], true);
  refused("has 6 steps behind it already", {"--resume", path("check"), "--steps", "6"});
  refused("--hidden", {"--resume", path("check"), "--hidden", "16"});
}

TEST_F(TrainCommand, RefusesACheckpointOfTheOtherEngine) {
  const train::Text text = train::load_text({folder_ / "text"});
  train::TrainConfig config;
  config.model.hidden = config.model.intermediate = config.model.sequence = 8;
  config.model.experts = 4;
  config.model.layers = 2;
  config.batch = 3;
  const train::Trainer trainer(config, {}, text);
  train::TrainState state = trainer.state();
  ASSERT_EQ(state.engine, EngineKind::kCpu);
  const auto save = [&] { train::save_checkpoint(path("check"), state, trainer.layout(), config, text); };
  state.engine = EngineKind::kCuda;
  save();
  refused("was trained with --engine cuda; this run has cpu", {"--resume", path("check"), "--engine", "cpu"});
  for (const EngineKind taken : {EngineKind::kCpu, EngineKind::kAuto}) {
    state.engine = taken;
    save();
    EXPECT_EQ(run_train(tiny({"--resume", path("check"), "--engine", "cpu"})).status, 0);
  }
}

TEST_F(TrainCommand, PrintsASummaryAndWritesTheLogToAFile) {
  const Outcome outcome = run_train(tiny({"--compare", "sequential", "--json", path("log.json")}));
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.out.find("loss (nats a byte): 5."), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("equal to the bit"), std::string::npos) << outcome.out;
  EXPECT_EQ(json::parse(io::read_text_file(folder_ / "log.json"))["steps"].size(), 4u);
}

TEST_F(TrainCommand, RefusesBadInputBeforeAnythingRuns) {
  io::write_file(folder_ / "empty", "");
  io::write_file(folder_ / "short", "too short");
  refused("does not exist", {"--text", path("missing")});
  refused("is empty", {"--text", path("empty")});
  refused("--experts: 4 can not be divided evenly over 3 ranks", {"--ranks", "3"});
  refused("--topk: 5", {"--topk", "5"});
  refused("--hidden: 12", {"--hidden", "12"});
  refused("--steps: '0'", {"--steps", "0"});
  refused("--steps: 'many'", {"--steps", "many"});
  refused("--learning-rate: 'fast'", {"--learning-rate", "fast"});
  refused("--learning-rate: 2", {"--learning-rate", "2"});
  refused("--seed: '-1'", {"--seed", "-1"});
  refused("--compare: 'twice'", {"--compare", "twice"});
  refused("--schedule: ", {"--schedule", "fusion=some"});
  refused("a file that exists", {"--schedule", "/nonexistent"});
  refused("--schedule-backward: ", {"--schedule-backward", "fission=none"});
  refused("--checkpoint-every: 5 without --checkpoint", {"--checkpoint-every", "5"});
  refused("--checkpoint: ", {"--checkpoint", path("no/such/folder/file")});
  refused("--json: ", {"--json", folder_.path().string()});
  for (const char* option : {"--checkpoint", "--json"}) {
    // More steps than a test has time for.
    expect_error(Status::kIo, std::string(option) + ": cannot write file '/proc/x'", [&] {
      run_train(tiny({option, "/proc/x", "--steps", "100000000"}));
    });
  }
  refused("--resume: ", {"--resume", path("missing")});
  refused("--resume: ", {"--resume", path("text")});
  refused("--sequence 5000 needs 5001", {"--sequence", "5000"});
  expect_error(Status::kInvalidArgument, "--sequence 128 needs 129", [&] { run_train({"--text", path("short")}); });
  EXPECT_EQ(folder_.entries(), 3u) << "nothing may have been written";
}

// A full disk under the log, or a pipe that nobody reads.
TEST_F(TrainCommand, AnErrorStreamThatCanNotBeWrittenEndsNothing) {
  const std::string checkpoint = (folder_ / "kept.safetensors").string();
  std::fflush(stderr);
  const int kept = ::dup(STDERR_FILENO), full = ::open("/dev/full", O_WRONLY);
  ASSERT_GE(::dup2(full, STDERR_FILENO), 0);
  ::close(full);
  const json log = run_json({"--checkpoint", checkpoint});
  std::clearerr(stderr);
  ::dup2(kept, STDERR_FILENO);
  ::close(kept);
  EXPECT_TRUE(std::filesystem::exists(checkpoint));
  EXPECT_FALSE(log.empty());
}

TEST_F(TrainCommand, NamesTheFileThatItCanNotWrite) {
  expect_error(Status::kIo, "--checkpoint: cannot write file '/dev/full'", [&] {
    run_json({"--checkpoint", "/dev/full"});
  });
}

TEST_F(TrainCommand, TakesSeveralTextsOfAnyName) {
  const std::string odd = path("caf\xe9");  // not UTF-8
  std::filesystem::copy_file(folder_ / "text", odd);
  const json log = run_json({"--text", path("text"), odd});
  EXPECT_EQ(log["text"]["files"].size(), 2u);
}

TEST_F(TrainCommand, ReportsWhatDiffers) {
  const train::Text text = train::load_text({folder_ / "text"});
  train::TrainConfig config;
  config.model = {.hidden = 8, .intermediate = 8, .experts = 4, .topk = 1, .layers = 1, .sequence = 8};
  config.batch = 1;
  train::Trainer trainer(config, {}, text);
  train::RunPlan plan;
  plan.steps = 1;
  train::Report report;
  report.record = train::train(trainer, plan);
  report.comparisons = {{"the first", 2, ""}, {"the second", 1, "step 1: loss 1 and 2"}};
  EXPECT_FALSE(report.all_equal());
  const json log = train::to_json(report, trainer, text);
  EXPECT_EQ(log["comparisons"][0], json({{"run", "the first"}, {"ranks", 2}, {"equal", true}}));
  EXPECT_EQ(log["comparisons"][1]["equal"], false);
  EXPECT_EQ(log["comparisons"][1]["first_difference"], "step 1: loss 1 and 2");
  EXPECT_NE(train::to_text(report, trainer, text).find("the second: DIFFERENT at step 1: loss 1 and 2"),
            std::string::npos);
  report.comparisons.pop_back();
  EXPECT_TRUE(report.all_equal());
}

TEST(TrainDefaultText, IsThereOnDebian) {
  if (!std::filesystem::exists("/usr/share/common-licenses/GPL-3")) {
    expect_error(Status::kInvalidArgument, "--text", [] { train::default_text_files(); });
    return;
  }
  const train::Text text = train::load_text(train::default_text_files());
  EXPECT_GT(text.training.size(), 100000u);
  text.check_window(128);
}

}  // namespace
}  // namespace uniep
