// The command line with a process a rank, on a stand-in for the CUDA driver, on which kernels do nothing: what ranks
// that were given something else than rank 0 end with.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/cuda/runtime/kernel_variant.h"
#include "fake_cuda/command_ranks.h"
#include "io/file.h"
#include "support/command.h"
#include "support/made_up_job.h"
#include "support/processes.h"
#include "support/shared_exchange.h"
#include "support/temporary_folder.h"
#include "tune/trial_mark.h"
#include "tune/tuned.h"

namespace uniep::test {
namespace {

// This process is as if it had been built of other kernels, of the same version.
void be_another_build() {
  const cuda::SourceSet& shipped = cuda::sources_of_kernel("");
  const std::string text = shipped.texts[0];
  cuda::set_kernel_variant(
      {.name = "another build", .kernels = {""}, .edits = {{shipped.names[0], text, text + "\n"}}, .options = {}});
}

const Arguments kLayer = {"--engine", "cuda",    "--ranks",   "2",        "--tokens",
                          "64",       "--shape", "64,32,8,2", "--launch", "processes"};
const Arguments kRun = join({"run"}, kLayer);
const Arguments kTune = join(join({"tune"}, kLayer), {"--candidates", "2", "--budget", "1", "--direction", "forward"});

TEST(RunProcesses, ATunedFileOfAnotherRankDoesNotCount) {
  const TemporaryFolder folder;
  const std::string bad = (folder / "bad.json").string();
  io::write_file(bad, "{");
  const std::vector<Ended> fine = run_ranks(folder, {kRun, join(kRun, {"--tuned", bad})});
  for (const Ended& ended : fine) EXPECT_EQ(ended.status, "0") << ended.said;
  expect_said(fine[0], "rank 1 has found another one");
  const std::vector<Ended> refused = run_ranks(folder, {join(kRun, {"--tuned", bad}), kRun});
  for (const Ended& ended : refused) {
    EXPECT_EQ(ended.status, "2") << ended.said;
    expect_said(ended, "bad.json");
  }
}

TEST(TuneProcesses, AnotherLayerIsRefusedBeforeAnythingIsTimed) {
  const TemporaryFolder folder;
  for (const Arguments& other :
       {Arguments{"--tokens", "32"}, Arguments{"--direction", "backward"}, Arguments{"--schedule", "order.raster=2"}}) {
    Arguments of_one = kTune;
    for (std::size_t i = 0; i + 1 < of_one.size(); ++i) {
      if (of_one[i] == other[0])
        of_one.erase(of_one.begin() + static_cast<std::ptrdiff_t>(i),
                     of_one.begin() + static_cast<std::ptrdiff_t>(i) + 2);
    }
    for (const Ended& ended : run_ranks(folder, {kTune, join(of_one, other)})) {
      EXPECT_EQ(ended.status, "2") << ended.said;
      expect_said(ended, "tune: rank 1 was given another layer, --tokens");
    }
  }
}

TEST(TuneProcesses, ARankOfAnotherBuildIsRefusedBeforeAnythingIsTimed) {
  const TemporaryFolder folder;
  const std::vector<Ended> ended = run_ranks(folder, {kTune, kTune}, [](std::size_t rank) {
    if (rank == 1) be_another_build();
  });
  for (const Ended& one : ended) EXPECT_EQ(one.status, "2") << one.said;
  expect_said(ended[0], "rank 1 has kernels ");
  expect_said(ended[1], "rank 0 has kernels ");
}

// Over whatever its ranks exchange.
TEST(TuneProcesses, ATunerOfAnotherBuildIsRefused) {
  MadeUpJob job;
  job.ranks = 2;
  SharedMailboxes mailboxes(job.ranks);
  std::vector<Process> processes;
  for (int rank = 0; rank < job.ranks; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      if (rank == 1) be_another_build();
      TunerOptions options = job_options(job, rank, std::make_shared<SharedExchange>(mailboxes, rank));
      reporter.line(reporter.error_of([&] { const Tuner tuner(options); }));
    });
  }
  for (Process& process : processes) {
    const std::string line = process.line(60);
    EXPECT_NE(line.find("rank 1 has other layers, another machine or another library than rank 0"), std::string::npos)
        << line;
  }
}

TEST(TunedKeys, OfAnotherBuildAreOthers) {
  const Arguments run = {"run", "--engine", "cpu", "--ranks", "2", "--workers", "2", "--tokens", "32", "--json", "-"};
  const Arguments tune = {"tune", "--engine", "cpu", "--ranks",      "2",      "--workers",
                          "2",    "--tokens", "32",  "--candidates", "1",      "--budget",
                          "1",    "--json",   "-",   "--direction",  "forward"};
  const TemporaryFolder folder;
  std::string found[2];
  for (const bool other : {false, true}) {
    Process process([&](const Reporter& reporter) {
      ::setenv("UNIEP_CACHE_DIR", (folder / "cache").c_str(), 1);
      if (other) be_another_build();
      if (!other) {
        run_command(tune);
        const tune::TunedFolder cache(folder / "cache");
        std::vector<tune::TunedSchedule> entries = cache.all();
        entries.at(0).schedule.order.raster = 7;
        cache.store(entries[0]);
      }
      reporter.line(run_command(run).json()["schedule"]["order.raster"].dump());
    });
    found[other ? 1 : 0] = process.line(60);
  }
  EXPECT_EQ(found[0], "7");
  EXPECT_NE(found[1], "7");
}

TEST(TuneProcesses, OfAFileOfSchedulesRankZerosCounts) {
  const TemporaryFolder folder;
  const auto file = [&](const std::string& name, const std::string& text) {
    io::write_file(folder / name, text);
    Arguments listed = kTune;
    const auto candidates = std::find(listed.begin(), listed.end(), "--candidates");
    listed.erase(candidates, candidates + 2);
    return join(listed, {"--schedules", (folder / name).string()});
  };
  const Arguments good = file("good", "order.raster=3\n"), bad = file("bad", "order.raster=0\n");
  for (const Ended& ended : run_ranks(folder, {good, bad})) EXPECT_EQ(ended.status, "0") << ended.said;
  for (const Ended& ended : run_ranks(folder, {bad, good})) {
    EXPECT_EQ(ended.status, "2") << ended.said;
    expect_said(ended, "line 1: order.raster=0");
  }
}

TEST(TuneProcesses, OfWhatTheSearchMayTakeRankZerosCounts) {
  const TemporaryFolder folder;
  Arguments other = kTune;
  *(std::find(other.begin(), other.end(), "--budget") + 1) = "30";
  const std::vector<Ended> ended = run_ranks(folder, {kTune, other});
  for (const Ended& one : ended) EXPECT_EQ(one.status, "0") << one.said;
  expect_said(ended[0], "rank 1 has another --candidates, --budget, --rounds, --state or --report; rank 0's count");
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache")) {
    EXPECT_TRUE(tune::journal_of_mark(entry.path()).empty()) << entry.path();
  }
}

// The journal whose both ranks have something under way, with the ranks standing still; empty where they have not.
std::filesystem::path stopped_in_a_trial(const TemporaryFolder& folder, const std::vector<Process>& ranks) {
  for (const Process& rank : ranks) rank.signal(SIGSTOP);
  for (const Process& rank : ranks) ::waitpid(rank.id(), nullptr, WUNTRACED);
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache", error)) {
    const std::filesystem::path journal = tune::journal_of_mark(entry.path());
    if (!journal.empty() && tune::left_behind(journal).size() == ranks.size()) return journal;
  }
  for (const Process& rank : ranks) rank.signal(SIGCONT);
  return {};
}

// As torchrun ends the others when a rank has ended, and all of them when it is ended itself.
TEST(TuneProcesses, WhatHasEndedARankIsOutAndWhatItsUserEndsIsNot) {
  for (const bool crashes : {false, true}) {
    const TemporaryFolder folder;
    const Arguments tune = join(join({"tune"}, kLayer), {"--candidates", "64", "--budget", "20"});
    std::vector<Process> ranks = start_ranks(folder, {tune, tune});
    std::filesystem::path journal;
    for (int attempt = 0; attempt < 2000 && journal.empty(); ++attempt) {
      ::usleep(2000);
      journal = stopped_in_a_trial(folder, ranks);
    }
    ASSERT_FALSE(journal.empty());
    ranks[1].signal(crashes ? SIGKILL : SIGTERM);
    ranks[0].signal(SIGTERM);
    for (Process& rank : ranks) rank.signal(SIGCONT);
    for (Process& rank : ranks) EXPECT_EQ(rank.line(), "");
    for (Process& rank : ranks) rank.end();
    EXPECT_EQ(tune::left_behind(journal).size(), crashes ? 1u : 0u);
  }
}

}  // namespace
}  // namespace uniep::test
