// `uniep bench --op layer --tune online` on the cpu engine: bytes, what it refuses, and that it survives being killed.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "io/file.h"
#include "support/command.h"
#include "support/environment.h"
#include "support/temporary_folder.h"
#include "tune/tuned.h"

namespace uniep::test {
namespace {

using Arguments = std::vector<std::string>;

const Arguments kJob = {"bench",
                        "--op",
                        "layer",
                        "--tune",
                        "online",
                        "--engine",
                        "cpu",
                        "--ranks",
                        "2",
                        "--workers",
                        "2",
                        "--shape",
                        "64,32,8,2",
                        "--tokens",
                        "60,33",
                        "--tune-budget",
                        "1",
                        "--begin",
                        "queue=static,order.interleave=mixed,order.experts_per_wave=4"};

bool has_journal(const std::filesystem::path& folder) {
  std::error_code none;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder, none)) {
    if (entry.path().extension() == ".online") return true;
  }
  return false;
}

TEST(BenchOnline, EveryCallHasTheBytesOfSequentialExecutionAndAKilledRunGoesOn) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const pid_t child = ::fork();
  if (child == 0) {
    run_command(join(kJob, {"--steps", "1000000", "--json", "-"}));
    ::_exit(1);
  }
  for (int i = 0; i < 1000 && !has_journal(folder.path()); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(has_journal(folder.path()));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));

  testing::internal::CaptureStderr();
  const CommandResult result = run_command(join(kJob, {"--steps", "30", "--json", "-"}));
  testing::internal::GetCapturedStderr();
  ASSERT_EQ(result.status, 0) << result.err;
  const nlohmann::json report = result.json();
  EXPECT_EQ(report["calls_compared"], 600);
  EXPECT_EQ(report["calls_differing"], 0);
  EXPECT_EQ(report["ms"].size(), 30u);
  EXPECT_GT(report["tried_calls"], 0);
  EXPECT_EQ(report["begin"]["order.experts_per_wave"], 4);
  EXPECT_EQ(report["begin"]["queue"], "static");

  // What the folder has is what a later run begins with.
  std::filesystem::remove_all(folder / "cache");
  const std::string file = (folder / "tuned.json").string();
  testing::internal::CaptureStderr();
  const CommandResult tuned =
      run_command({"tune", "--engine", "cpu", "--ranks", "2", "--workers", "2", "--shape", "64,32,8,2", "--tokens",
                   "60,33", "--budget", "1", "--candidates", "1", "--direction", "forward", "--export", file});
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  tune::TunedSchedule entry = tune::parse_tuned(io::read_text_file(file)).at(0);
  entry.schedule.order.raster = 3;
  tune::TunedFolder(folder / "cache").store(entry);
  const CommandResult again = run_command(join(kJob, {"--steps", "1", "--calls", "2", "--json", "-"}));
  testing::internal::GetCapturedStderr();
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_EQ(again.json()["schedule"]["order.raster"], 3);
  // Beside given fields, too.
  testing::internal::CaptureStderr();
  const CommandResult given = run_command(
      join(kJob, {"--steps", "1", "--calls", "2", "--schedule", "order.source_rotation=off", "--json", "-"}));
  testing::internal::GetCapturedStderr();
  ASSERT_EQ(given.status, 0) << given.err;
  EXPECT_EQ(given.json()["schedule"]["order.raster"], 3);
  EXPECT_EQ(given.json()["schedule"]["order.source_rotation"], "off");
  EXPECT_NE(again.json()["begin"]["order.raster"], 3);
}

TEST(BenchOnline, SixtyFourRanksHaveTheBytesOfSequentialExecution) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const Arguments job = {"bench",
                         "--op",
                         "layer",
                         "--tune",
                         "online",
                         "--engine",
                         "cpu",
                         "--ranks",
                         "64",
                         "--shape",
                         "32,16,64,2",
                         "--tokens",
                         "8",
                         "--workers",
                         "1",
                         "--calls",
                         "8",
                         "--begin",
                         "queue=static,order.interleave=mixed",
                         "--tune-budget",
                         "1",
                         "--json",
                         "-"};
  int tried = 0;
  for (int steps = 16; tried == 0; steps *= 2) {  // until layers have paid for the checks of candidates
    ASSERT_LE(steps, 1024) << "nothing was tried";
    testing::internal::CaptureStderr();
    const CommandResult result = run_command(join(job, {"--steps", std::to_string(steps)}));
    testing::internal::GetCapturedStderr();
    ASSERT_EQ(result.status, 0) << result.err;
    const nlohmann::json report = result.json();
    EXPECT_EQ(report["calls_compared"], 8 * steps);
    EXPECT_EQ(report["calls_differing"], 0);
    tried = report["tried_calls"];
  }
}

TEST(BenchOnline, BadUsageIsRefusedWithTheArgumentsName) {
  const std::vector<std::pair<Arguments, Arguments>> cases = {
      {{"--op", "backward"}, {"--op", "'backward'", "layer"}},
      {{"--launch", "processes"}, {"--launch", "threads"}},
      {{"--trace", "a.json"}, {"--trace", "no timeline"}},
      {{"--routing", "a.npy"}, {"--routing", "a kind"}},
      {{"--steps", "0"}, {"--steps", "'0'"}},
      {{"--tune-budget", "2"}, {"--tune-budget", "'2'", "0 to 1"}},
      {{"--tune-budget", "nan"}, {"--tune-budget", "'nan'"}},
      {{"--only", "layer"}, {"--only: not with --tune online"}},
      {{"--repeat", "3"}, {"--repeat: not with --tune online"}},
      {{"--warm-up", "1"}, {"--warm-up: not with --tune online"}},
      {{"--sustained", "1"}, {"--sustained: not with --tune online"}},
      {{"--begin", "queue=fast"}, {"--begin", "queue"}},
      {{"--begin", "order.raster=0"}, {"--begin", "order.raster"}},
  };
  for (const auto& [more, named] : cases) {
    Arguments arguments = {"bench", "--op", "layer", "--tune", "online", "--engine", "cpu", "--ranks", "2"};
    if (more.front() == "--op") arguments.erase(arguments.begin() + 1, arguments.begin() + 3);
    arguments = join(join(arguments, {"--shape", "64,32,8,2", "--tokens", "8", "--steps", "1"}), {});
    if (more.front() == "--steps") arguments.resize(arguments.size() - 2);
    const CommandResult result = run_command(join(arguments, more));
    EXPECT_EQ(result.status, 2) << more.front() << result.err;
    EXPECT_TRUE(result.one_line_error()) << result.err;
    for (const std::string& name : named) EXPECT_NE(result.err.find(name), std::string::npos) << result.err << name;
  }
  const CommandResult sustained = run_command({"bench", "--op", "layer", "--sustained", "2"});
  EXPECT_EQ(sustained.status, 2);
  EXPECT_NE(sustained.err.find("--sustained: '2'"), std::string::npos) << sustained.err;
  for (const char* option : {"--steps", "--calls"}) {
    const CommandResult alone = run_command({"bench", "--op", "layer", option, "3"});
    EXPECT_EQ(alone.status, 2);
    EXPECT_NE(alone.err.find(std::string(option) + ": without --tune online"), std::string::npos) << alone.err;
  }
}

}  // namespace
}  // namespace uniep::test
