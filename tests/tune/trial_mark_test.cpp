// A search that its user ends tries again what it was trying; one that crashes does not.
#include "tune/trial_mark.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <string>

#include "io/file.h"
#include "support/command.h"
#include "support/environment.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "tune/journal.h"

namespace uniep::test {
namespace {

Schedule a_schedule(int raster) {
  Schedule schedule;
  schedule.order.raster = raster;
  return schedule;
}

// A process of a search that stands in the middle of a trial.
Process searching(const std::filesystem::path& journal, int process, int processes) {
  Process started([=](const Reporter& reporter) {
    for (const int reset : {SIGHUP, SIGINT, SIGTERM, SIGSEGV, SIGABRT}) std::signal(reset, SIG_DFL);
    io::remove_temporaries_at_signals();
    tune::TrialMark mark(journal, process, processes);
    mark.begin(a_schedule(2));
    mark.end();
    mark.begin(a_schedule(3));
    reporter.line("began");
    ::pause();
  });
  EXPECT_EQ(started.line(), "began");
  return started;
}

void end_by(Process& process, int signal) {
  process.signal(signal);
  EXPECT_EQ(process.line(), "");  // until it has ended
}

TEST(TrialMark, WhatItsUserEndsIsForgivenAndACrashIsNot) {
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGSEGV, SIGABRT, SIGKILL}) {
    const TemporaryFolder folder;
    const auto file = folder / "a.tried";
    Process process = searching(file, 0, 1);
    end_by(process, signal);
    process.end();
    const bool crash = signal == SIGSEGV || signal == SIGABRT || signal == SIGKILL;
    const tune::Journal journal(file);
    EXPECT_EQ(journal.is_out(a_schedule(3)), crash) << signal;
    EXPECT_FALSE(journal.is_out(a_schedule(2)));
    EXPECT_TRUE(tune::left_behind(file).empty());  // it stands in the journal now
    EXPECT_EQ(tune::Journal::look(file).is_out(a_schedule(3)), crash) << signal;
  }
}

// torchrun sends SIGTERM to the other ranks when one has ended.
TEST(TrialMark, WhatHasEndedOneProcessIsOutThoughTheOthersAreAskedToEnd) {
  for (const int crashed : {-1, 0, 1}) {
    const TemporaryFolder folder;
    const auto file = folder / "a.tried";
    Process processes[] = {searching(file, 0, 2), searching(file, 1, 2)};
    if (crashed >= 0) end_by(processes[crashed], SIGSEGV);
    for (int i = 0; i < 2; ++i) {
      if (i != crashed) end_by(processes[i], SIGTERM);
      processes[i].end();
    }
    EXPECT_EQ(tune::Journal(file).is_out(a_schedule(3)), crashed >= 0) << crashed;
  }
}

TEST(TrialMark, KnowsWhetherAnotherProcessWasEndedOrCrashed) {
  const TemporaryFolder folder;
  const auto file = folder / "a.tried";
  tune::TrialMark own(file, 0, 3);
  EXPECT_FALSE(own.all_are_there());
  Process first = searching(file, 1, 3), second = searching(file, 2, 3);
  EXPECT_TRUE(own.all_are_there());
  end_by(first, SIGKILL);
  EXPECT_FALSE(own.another_has_left());
  end_by(second, SIGTERM);
  EXPECT_TRUE(own.another_has_left());
  own.drop();
  EXPECT_FALSE(own.another_has_left());
}

TEST(TrialMark, OfASearchThatLivesSaysNothingYetAndIsForgottenWithItsJournal) {
  const TemporaryFolder folder;
  const auto file = folder / "a.tried";
  {
    const tune::Journal living(file);
    Process process = searching(living.file(), 0, 1);
    process.end();
    EXPECT_FALSE(tune::Journal::look(file).is_out(a_schedule(3)));
  }
  EXPECT_TRUE(tune::Journal::look(file).is_out(a_schedule(3)));
  tune::Journal::forget(file);
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(TrialMark, WhereNothingCanBeWrittenNothingIsMarked) {
  tune::TrialMark mark("/proc/uniep/a.tried", 0, 1);
  EXPECT_FALSE(mark.marks() || mark.all_are_there() || mark.another_has_left());
  tune::TrialMark nowhere({}, 0, 2);
  nowhere.begin(a_schedule(3));
  EXPECT_FALSE(nowhere.marks() || nowhere.another_has_left());
}

std::string tried_now(const std::filesystem::path& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::filesystem::path journal = tune::journal_of_mark(entry.path());
    if (journal.empty()) continue;
    for (const std::string& schedule : tune::left_behind(journal)) return schedule;
  }
  return {};
}

// The command in a process of its own that stands still in a candidate's trial, of which `under_way` says which; -1
// where it ended before one was seen.
pid_t stopped_in_a_trial(const std::vector<std::string>& command, const std::filesystem::path& folder,
                         std::string& under_way) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGINT, SIG_DFL);
    io::remove_temporaries_at_signals();
    run_command(command);
    ::_exit(0);
  }
  std::string first;  // the default
  while (::waitpid(child, nullptr, WNOHANG) == 0) {
    ::usleep(500);
    const std::string seen = tried_now(folder);
    if (first.empty()) first = seen;
    if (seen.empty() || seen == first) continue;
    ::kill(child, SIGSTOP);
    int status = 0;
    if (::waitpid(child, &status, WUNTRACED) != child || !WIFSTOPPED(status)) return -1;
    under_way = tried_now(folder);
    if (!under_way.empty() && under_way != first) return child;
    ::kill(child, SIGCONT);
  }
  return -1;
}

TEST(TuneCommand, ASearchThatIsInterruptedTriesAgainWhatItWasTrying) {
  const std::vector<std::string> tune = {
      "tune",         "--engine",     "cpu", "--ranks",  "2", "--workers", "2", "--tokens",    "256",    "--shape",
      "256,128,16,4", "--candidates", "5",   "--budget", "1", "--json",    "-", "--direction", "forward"};
  for (const int signal : {SIGINT, SIGKILL}) {
    const TemporaryFolder folder;
    const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
    std::string under_way;
    pid_t child = -1;
    for (int attempt = 0; attempt < 20 && child < 0; ++attempt) {
      child = stopped_in_a_trial(tune, folder / "cache", under_way);
    }
    ASSERT_GT(child, 0);
    ::kill(child, signal);
    ::kill(child, SIGCONT);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;

    const CommandResult again = run_command(tune);
    ASSERT_EQ(again.status, 0) << again.err;
    const Schedule schedule =
        resolve(PartialSchedule::parse(under_way),
                {.direction = Direction::kForward, .shape = {256, 128, 16, 4}, .machine = {EngineKind::kCpu, 2, 2}});
    int found = 0;
    const nlohmann::json tried = again.json().at("tuned").at(0).at("tried");
    for (const nlohmann::json& one : tried) {
      if (one.at("schedule") != nlohmann::json::parse(to_json(schedule))) continue;
      ++found;
      EXPECT_EQ(one.at("verdict") == "failed", signal == SIGKILL) << one.dump();
    }
    EXPECT_EQ(found, 1) << under_way;
    EXPECT_EQ(tried_now(folder / "cache"), "");
  }
}

}  // namespace
}  // namespace uniep::test
