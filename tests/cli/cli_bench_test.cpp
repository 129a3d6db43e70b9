// `uniep bench`: its argument checks, which need no GPU, and its report where there is one.
#include <gtest/gtest.h>

#include "support/command.h"
#include "support/environment.h"

namespace uniep::test {
namespace {

using Arguments = std::vector<std::string>;

const Arguments kGemm = {"bench",   "--op", "gemm",     "--shape", "256,128,8,2", "--tokens", "200",
                         "--ranks", "2",    "--repeat", "3"};

bool has_gpu() {
  return run_command({"info", "--json", "-"}).json()["engines"]["cuda"]["available"] == true;
}

TEST(BenchCommand, BadUsageIsRefusedWithTheArgumentsName) {
  const std::vector<std::pair<Arguments, Arguments>> cases = {
      {{"--shape", "nothing"}, {"--shape", "nothing", "qwen3-30b", "mixtral"}},
      {{"--shape", "7,8,2,1"}, {"hidden", "7", "multiple of 8"}},
      {{"--ranks", "3"}, {"256", "3 ranks"}},
      {{"--tokens", "1,2,3"}, {"--tokens", "3 numbers"}},
      {{"--tokens", "-1"}, {"--tokens", "'-1'"}},
      {{"--repeat", "0"}, {"--repeat", "'0'"}},
      {{"--sustained", "0"}, {"--sustained", "'0'", "seconds"}},
      {{"--warm-up", "-1"}, {"--warm-up", "'-1'", "seconds"}},
      {{"--sustained", "soon"}, {"--sustained", "'soon'"}},
      {{"--sustained", "nan"}, {"--sustained", "'nan'"}},
      {{"--only", "fc1,fc3"}, {"--only", "'fc3'", "fc2"}},
      {{"--devices", "x"}, {"--devices", "'x'"}},
      {{"--engine", "cpu"}, {"--engine", "'cpu'", "cuda"}},
      {{"--bias"}, {"--bias: with --op gemm", "layer and backward"}},
      {{"--json", "/no/such/folder/a.json"}, {"--json"}},
      {{"--trace", "a.json"}, {"--trace", "'a.json'", "layer"}},
      {{"--launch", "mpi"}, {"--launch", "'mpi'", "threads|processes"}},
      {{"--launch", "processes"}, {"--launch", "'processes'", "threads with --op gemm"}},
  };
  for (const auto& [more, named] : cases) {
    expect_failure(join({"bench", "--op", "gemm"}, more), more.front() == "--json" ? 1 : 2, named);
  }
  expect_failure({"bench"}, 2, {"--op"});
  expect_failure({"bench", "--op", "nothing"}, 2, {"--op", "'nothing'", "gemm"});
}

TEST(BenchCommand, AMissingGpuIsAFailureInOneLine) {
  expect_failure(join(kGemm, {"--devices", "1023"}), 1, {"--devices"});
  for (const char* const operation : {"layer", "backward", "step", "dispatch", "combine"}) {
    Arguments arguments = join(kGemm, {"--devices", "1023"});
    arguments[2] = operation;
    expect_failure(arguments, 1, {"--devices"});
  }
  if (has_gpu()) return;
  expect_failure(kGemm, 1, {"no Hopper GPU to measure", "uniep simulate"});
  EXPECT_EQ(run_command(kGemm).err.find("--devices"), std::string::npos);
}

// Started here or by torchrun, the ranks are checked before anything runs.
TEST(BenchCommand, ProcessesAreChecked) {
  Arguments arguments = join(kGemm, {"--launch", "processes"});
  for (const char* const operation : {"layer", "backward", "step", "dispatch", "combine"}) {
    const ScopedRankVariables none(Variables{});
    arguments[2] = operation;
    expect_failure(arguments, 2, {"--launch", "torchrun"});
  }
  const ScopedRankVariables first({{"RANK", "0"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "0"}, {"MASTER_PORT", "29500"}});
  expect_failure(arguments, 2, {"--ranks", "2", "WORLD_SIZE, 3"});
}

TEST(BenchCommand, EveryOperationSaysHowItWasLaunched) {
  if (!has_gpu()) GTEST_SKIP() << "no Hopper GPU";
  for (const char* const operation : {"layer", "backward", "step", "dispatch", "combine"}) {
    Arguments arguments = join(kGemm, {"--json", "-"});
    arguments[2] = operation;
    const CommandResult result = run_command(arguments);
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.json()["launch"], "threads");
    for (const auto& entry : result.json()["results"]) EXPECT_GT(entry["ms"]["median"].get<double>(), 0.0) << entry;
    if (arguments[2] == "layer") {
      EXPECT_EQ(result.json()["results"].size(), 10u);
    }
  }
}

TEST(BenchCommand, ReportsMemoryAndBothWaysOfTheLinks) {
  if (!has_gpu()) GTEST_SKIP() << "no Hopper GPU";
  for (const char* const mode : {"bf16", "fp32", "main_grad"}) {
    Arguments arguments = join(kGemm, {"--json", "-", "--wgrad", mode});
    arguments[2] = "step";
    const CommandResult result = run_command(arguments);
    ASSERT_EQ(result.status, 0) << result.err;
    const nlohmann::json json = result.json();
    EXPECT_GT(json["memory"]["forward"]["saved_bytes"].get<int64_t>(), 0);
    EXPECT_GT(json["memory"]["backward"]["workspace_bytes"].get<int64_t>(), 0);
    EXPECT_GT(json["ratios"]["layer / gemms"].get<double>(), 0.0);
    EXPECT_GT(json["ratios"]["sequential / layer"].get<double>(), 0.0);
  }
}

TEST(BenchCommand, ReportsEveryGemm) {
  if (!has_gpu()) GTEST_SKIP() << "no Hopper GPU";
  const CommandResult result = run_command(join(kGemm, {"--json", "-", "--sustained", "0.01", "--warm-up", "0.01"}));
  ASSERT_EQ(result.status, 0) << result.err;
  const nlohmann::json json = result.json();
  EXPECT_EQ(json["op"], "gemm");
  EXPECT_EQ(json["results"].size(), 10u);
  for (const auto& entry : json["results"]) {
    EXPECT_GT(entry["ms"]["median"].get<double>(), 0.0) << entry;
    EXPECT_GT(entry["tflops"].get<double>(), 0.0) << entry;
  }
}

}  // namespace
}  // namespace uniep::test
