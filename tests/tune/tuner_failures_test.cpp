// A tuner's calls that fail: under what it has taken, timed or not, and by no fault of their Schedule.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/file.h"
#include "support/expect_error.h"
#include "support/made_up_job.h"
#include "support/processes.h"
#include "support/shared_exchange.h"
#include "support/temporary_folder.h"
#include "tune/journal.h"
#include "tune/online_search.h"
#include "tune/tuned.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

enum class End { kMeasured, kFailed, kVoid, kSilent };
using EndOfCall = std::function<End(const TunerCall&)>;

// A job whose calls end as a test says.
class EndingJob {
 public:
  explicit EndingJob(const MadeUpJob& job, int rank = 0, const std::shared_ptr<TunerExchange>& exchange = nullptr)
      : job_(job), tuner_(std::make_unique<Tuner>(logged(job_options(job, rank, exchange)))) {}

  void call(const EndOfCall& end) {
    const TunerCall planned = tuner_->schedule(0, Direction::kForward);
    const int i = job_number(planned.schedule);
    ++used_[i];
    switch (end ? end(planned) : End::kMeasured) {
      case End::kMeasured:
        return tuner_->measured(planned, {10 * job_.factors[static_cast<std::size_t>(i)], 1000, 1000});
      case End::kFailed:
        return tuner_->failed(planned, "planted");
      case End::kVoid:
        return tuner_->not_measured(planned);
      case End::kSilent:
        return;
    }
  }
  void calls(const EndOfCall& end = {}) {
    for (int k = 0; k < job_.calls; ++k) call(end);
  }
  void step(const EndOfCall& end = {}) {
    if (tuner_->wants_round()) tuner_->begin_round();
    calls(end);
    tuner_->step();
  }
  // Steps until it is the incumbent.
  void take(int i) {
    for (int step = 0; step < 400 && incumbent() != i; ++step) this->step();
    ASSERT_EQ(incumbent(), i);
  }

  Tuner& tuner() { return *tuner_; }
  int incumbent() const { return job_number(tuner_->incumbent(0, Direction::kForward)); }
  int used(int i) { return used_[i]; }
  std::string decided() const {
    std::string all;
    for (const TunerDecision& one : tuner_->decisions()) {
      if (one.verdict == "slower") continue;
      all += fmt::format("{}{} {}", all.empty() ? "" : ", ", one.verdict, job_number(one.schedule));
    }
    return all;
  }
  int said(const std::string& part) const {
    return static_cast<int>(std::count_if(
        log_.begin(), log_.end(), [&](const std::string& line) { return line.find(part) != std::string::npos; }));
  }

 private:
  TunerOptions logged(TunerOptions options) {
    options.log = [this](const std::string& line) { log_.push_back(line); };
    return options;
  }
  MadeUpJob job_;
  std::vector<std::string> log_;
  std::map<int, int> used_;
  std::unique_ptr<Tuner> tuner_;
};

// One at a time, so that 2 takes the place of 1.
MadeUpJob two_faster(const std::filesystem::path& folder) {
  MadeUpJob job;
  job.factors = {1, 0.9, 0.8};
  job.batch = 1;
  job.folder = folder;
  return job;
}

tune::TunedKey key_of(const MadeUpJob& job) {
  const TunerOptions options = job_options(job, 0, nullptr);
  const TunerLayer& layer = options.layers[0];
  return {options.machine_name,
          1,
          layer.config.shape,
          layer.config.numerics,
          Direction::kForward,
          tune::token_bucket(layer.tokens),
          ""};
}

// What the folder has; -1: nothing.
int kept(const MadeUpJob& job) {
  const std::optional<tune::TunedSchedule> entry = tune::TunedFolder(job.folder).find(key_of(job));
  return entry ? job_number(entry->schedule) : -1;
}

std::filesystem::path journal_of(const MadeUpJob& job) {
  return tune::TunedFolder(job.folder).path(key_of(job)).replace_extension(".online");
}

int lines_of(const MadeUpJob& job, const std::string& verdict) {
  if (!std::filesystem::exists(journal_of(job))) return 0;
  const std::vector<tune::JournalLine> lines = tune::parse_journal(io::read_text_file(journal_of(job)));
  return static_cast<int>(std::count_if(lines.begin(), lines.end(), [&](const tune::JournalLine& line) {
    return tune::verdict_name(line.verdict) == verdict;
  }));
}

// Ends the first call under Schedule i that is timed, or is not.
EndOfCall first_of(int i, bool timed, End end) {
  return [i, timed, end, is_over = false](const TunerCall& call) mutable {
    if (is_over || job_number(call.schedule) != i || call.timed != timed) return End::kMeasured;
    is_over = true;
    return end;
  };
}

TEST(TunerFailures, ACallUnderATakenScheduleThatFailsPutsItOutTimedOrNot) {
  for (const bool timed : {true, false}) {
    TemporaryFolder folder;
    const MadeUpJob job = two_faster(folder.path());
    {
      EndingJob own(job);
      own.take(2);
      EXPECT_EQ(kept(job), 2);
      own.step(first_of(2, timed, End::kFailed));
      EXPECT_EQ(own.said("the incumbent's call failed here: planted"), 1);
      own.step();
      EXPECT_EQ(own.incumbent(), 1) << "timed: " << timed;
      EXPECT_EQ(own.decided(), "taken 1, taken 2, failed 2");
      EXPECT_EQ(kept(job), 1) << "what is back is kept again";
      const int used = own.used(2);
      for (int step = 0; step < 40; ++step) own.step();
      EXPECT_EQ(own.used(2), used);
      // What a job was given has nothing behind it.
      own.step(first_of(1, timed, End::kFailed));
      own.step();
      EXPECT_EQ(own.incumbent(), 0);
      EXPECT_EQ(kept(job), -1);
      own.step(first_of(0, timed, End::kFailed));
      for (int step = 0; step < 4; ++step) own.step();
      EXPECT_EQ(own.incumbent(), 0);
      EXPECT_EQ(own.decided(), "taken 1, taken 2, failed 2, failed 1");
    }
    EXPECT_EQ(lines_of(job, "failed"), 2);
    EndingJob next(job);
    for (int step = 0; step < 20; ++step) next.step();
    EXPECT_EQ(next.incumbent(), 0);
    EXPECT_EQ(next.used(1) + next.used(2), 0);
  }
}

TEST(TunerFailures, AJobThatEndsByTheFailureDoesNotBeginTheNextWithIt) {
  for (const bool timed : {true, false}) {
    TemporaryFolder folder;
    const MadeUpJob job = two_faster(folder.path());
    {
      EndingJob own(job);
      own.take(2);
      own.calls(first_of(2, timed, End::kFailed));
    }
    EXPECT_EQ(lines_of(job, "failed"), 1) << "timed: " << timed;
    EXPECT_EQ(kept(job), 1) << "timed: " << timed;
    EndingJob next(job);
    EXPECT_EQ(next.incumbent(), 1);
    for (int step = 0; step < 20; ++step) next.step();
    EXPECT_EQ(next.used(2), 0);
  }
}

// As a Python program that ends by an exception: nothing is cleaned up.
TEST(TunerFailures, AProgramThatDiesOfTheFailureDoesNotBeginWithItAgain) {
  TemporaryFolder folder;
  const MadeUpJob job = two_faster(folder.path());
  const pid_t child = ::fork();
  if (child == 0) {
    EndingJob own(job);
    own.take(2);
    own.calls(first_of(2, false, End::kFailed));
    ::_exit(own.incumbent());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 2);
  EndingJob next(job);
  EXPECT_EQ(next.incumbent(), 0);
  for (int step = 0; step < 20; ++step) next.step();
  EXPECT_EQ(next.used(2), 0);
}

TEST(TunerFailures, AFrozenTunerKeepsWhatFailedForTheNextJob) {
  for (const bool before : {true, false}) {  // the last step
    TemporaryFolder folder;
    const MadeUpJob job = two_faster(folder.path());
    {
      EndingJob own(job);
      own.take(2);
      if (before) own.calls(first_of(2, true, End::kFailed));
      own.tuner().freeze();
      own.step(before ? EndOfCall() : first_of(2, false, End::kFailed));
      EXPECT_EQ(own.incumbent(), 2);
    }
    EXPECT_EQ(EndingJob(job).incumbent(), 1) << before;
  }
}

TEST(TunerFailures, ACandidateWhoseCallFailedBeforeTheEndIsNotTriedAgain) {
  for (const bool frozen : {true, false}) {
    TemporaryFolder folder;
    MadeUpJob job = two_faster(folder.path());
    {
      EndingJob own(job);
      while (own.used(1) < 5) own.step();  // no more its first use
      ASSERT_EQ(own.incumbent(), 0);
      for (bool failed = false; !failed;) {
        own.calls([&](const TunerCall& call) {
          if (failed || job_number(call.schedule) != 1) return End::kMeasured;
          failed = true;
          return End::kFailed;
        });
        if (!failed) own.tuner().step();
      }
      if (frozen) own.tuner().freeze();
    }
    EXPECT_EQ(lines_of(job, "failed"), 1) << frozen;
  }
}

// What one rank of two says of one call under what was taken, and the other one: the decisions of both.
std::vector<std::string> decisions_of_two(bool timed, End first, End second) {
  SharedMailboxes mailboxes(2);
  std::vector<Process> processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      MadeUpJob job = two_faster("");
      job.ranks = 2;
      EndingJob own(job, rank, std::make_shared<SharedExchange>(mailboxes, rank));
      own.take(2);
      own.step(first_of(2, timed, rank == 0 ? first : second));
      std::string steps;
      for (int step = 0; step < 4; ++step) {
        steps += std::to_string(own.incumbent());
        own.step();
      }
      reporter.line(own.decided() + "; " + steps);
    });
  }
  return {processes[0].line(60), processes[1].line(60)};
}

TEST(TunerFailures, AllRanksFallBackTogetherUnlessOneDidNotMakeTheCall) {
  const std::string back = "taken 1, taken 2, failed 2; 2111", stays = "taken 1, taken 2; 2222";
  const auto both = [](const std::string& text) { return std::vector(2, text); };
  for (const bool timed : {true, false}) {
    EXPECT_EQ(decisions_of_two(timed, End::kMeasured, End::kFailed), both(back)) << timed;
    EXPECT_EQ(decisions_of_two(timed, End::kFailed, End::kFailed), both(back)) << timed;
    EXPECT_EQ(decisions_of_two(timed, End::kVoid, End::kFailed), both(stays)) << timed;
    EXPECT_EQ(decisions_of_two(timed, End::kFailed, End::kVoid), both(stays)) << timed;
    EXPECT_EQ(decisions_of_two(timed, End::kVoid, End::kVoid), both(stays)) << timed;
  }
}

TEST(TunerFailures, AnIncumbentThatOnlySeemedToFailStaysInTheFolder) {
  TemporaryFolder folder;
  const MadeUpJob job = two_faster(folder.path());
  {
    EndingJob own(job);
    own.take(2);
    own.step([&](const TunerCall& call) {
      if (call.number % 20 != 0) return End::kMeasured;
      own.tuner().failed(call, "it timed out");
      return End::kVoid;
    });
    EXPECT_EQ(lines_of(job, "failed"), 1);
    own.step();
    EXPECT_EQ(lines_of(job, "failed"), 0);
  }
  EXPECT_EQ(kept(job), 2);
  EXPECT_EQ(EndingJob(job).incumbent(), 2);
}

// Has the search take it.
void take(tune::OnlineSearch& search, int i) {
  search.begin_round({job_schedule(i)}, true);
  double allowed = 1e6;
  for (int step = 0; step < 200 && search.incumbent() != job_schedule(i); ++step) {
    for (int call = 0; call < 8; ++call) {
      const tune::PlannedCall planned = search.next_call();
      search.apply(planned, {.milliseconds = planned.of_candidate ? 0.9 : 1});
    }
    bool first_use = false;
    search.decide(allowed, 8, first_use);
  }
  ASSERT_EQ(search.incumbent(), job_schedule(i));
}

// What fails was replaced in the two steps until all know.
TEST(OnlineSearch, AnIncumbentThatFailedIsNotFallenBackTo) {
  tune::OnlineSearch search(job_schedule(0));
  search.begin_with(job_schedule(1));
  EXPECT_EQ(*search.earlier(), job_schedule(0));
  take(search, 2);
  search.incumbent_failed(job_schedule(0), 0);
  search.incumbent_failed(job_schedule(1), 3);
  EXPECT_EQ(search.incumbent(), job_schedule(2));
  double allowed = 0;
  bool first_use = false;
  const std::vector<tune::OnlineEvent> events = search.decide(allowed, 8, first_use);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].failed, job_schedule(1));
  search.incumbent_failed(job_schedule(2), 0);
  EXPECT_EQ(search.incumbent(), job_schedule(0));
  EXPECT_EQ(search.earlier(), nullptr);
}

TEST(OnlineSearch, WhatWasTakenTwiceIsGoneOnceItFails) {
  tune::OnlineSearch search(job_schedule(0));
  for (const int i : {1, 2, 1}) take(search, i);
  search.incumbent_failed(job_schedule(1), 0);
  EXPECT_EQ(search.incumbent(), job_schedule(2));
  search.incumbent_failed(job_schedule(2), 0);
  EXPECT_EQ(search.incumbent(), job_schedule(0));
  // What it was made with stays, also where it was taken.
  for (const int i : {3, 0}) take(search, i);
  EXPECT_EQ(search.earlier(), nullptr);
  search.incumbent_failed(job_schedule(0), 0);
  search.apply(search.next_call(), {.failed_on = 0});
  EXPECT_EQ(search.incumbent(), job_schedule(0));
}

TEST(TunerFailures, ACandidatesCallThatIsNotMeasuredCostsItsPairAlone) {
  MadeUpJob job;
  job.factors = {1, 0.9};
  int lost = 0;
  const EndOfCall three_times = [&](const TunerCall& call) {
    return job_number(call.schedule) == 1 && lost < 3 && ++lost > 0 ? End::kVoid : End::kMeasured;
  };
  EndingJob own(job);
  for (int step = 0; step < 60 && own.incumbent() == 0; ++step) own.step(three_times);
  EXPECT_EQ(lost, 3);
  EXPECT_EQ(own.decided(), "taken 1");
  // One that nobody speaks of hangs.
  EndingJob silent(job);
  for (int step = 0; step < 60; ++step) silent.step(first_of(1, true, End::kSilent));
  EXPECT_EQ(silent.decided(), "failed 1");
}

TEST(TunerFailures, WhatOtherRanksSayOfACallThatOneDidNotMakeIsNoFault) {
  for (const End other : {End::kFailed, End::kSilent}) {
    SharedMailboxes mailboxes(2);
    std::vector<Process> processes;
    for (int rank = 0; rank < 2; ++rank) {
      processes.emplace_back([&, rank](const Reporter& reporter) {
        MadeUpJob job;
        job.factors = {1, 0.9};
        job.ranks = 2;
        EndingJob own(job, rank, std::make_shared<SharedExchange>(mailboxes, rank));
        const EndOfCall once = first_of(1, true, rank == 0 ? other : End::kVoid);
        EndOfCall end = once;
        for (int step = 0; step < 60; ++step) own.step([&](const TunerCall& call) { return end(call); });
        reporter.line(own.decided());
      });
    }
    for (Process& process : processes) EXPECT_EQ(process.line(60), "taken 1");
  }
}

// One at a time has its first use, so one line at most says that something is tried; at an end none does. One that
// joins late has its first use while another is taken, and begins again behind those that were before it.
TEST(TunerFailures, TheJournalSaysUntriedOfTheOneInUseAlone) {
  MadeUpJob job;
  job.factors = {1, 0.99, 0.9, 1.2};
  job.calls = 6;
  int in_use = 0, taken = 0;
  for (int joins = 20; joins < 30; ++joins) {
    const int own_steps = joins % 2 == 0 ? 1 : 8;  // under what is taken
    TemporaryFolder folder;
    job.folder = folder.path();
    job.compiled_at = {{3, joins}};
    auto rank = std::make_unique<MadeUpRank>(job, 0, nullptr);
    for (int step = 0, after = 0; step < 60 && after < own_steps; ++step) {
      rank->step();
      after += rank->outcome().incumbent == 2;
      const int untried = lines_of(job, "untried");
      EXPECT_LE(untried, 1) << "joins at " << joins << ", step " << step;
      in_use += untried;
    }
    taken += rank->outcome().incumbent == 2;
    rank.reset();
    EXPECT_EQ(lines_of(job, "untried"), 0) << "joins at " << joins;
  }
  EXPECT_GT(in_use, 10);
  EXPECT_EQ(taken, 10);
}

TEST(TunerFailures, AnErrorInADecisionFreezesTheTuner) {
  MadeUpJob job;
  job.factors = {1, 1.2};
  TunerOptions options = job_options(job, 0, nullptr);
  options.log = [](const std::string& line) {
    if (line.find("slower") != std::string::npos) throw Error(Status::kIo, "the log is full");
  };
  Tuner tuner(options);
  const auto step = [&] {
    if (tuner.wants_round()) tuner.begin_round();
    for (int k = 0; k < 20; ++k) {
      const TunerCall call = tuner.schedule(0, Direction::kForward);
      tuner.measured(call, {job_number(call.schedule) == 0 ? 10.0 : 12.0, 1000, 1000});
    }
    tuner.step();
  };
  expect_error(Status::kIo, "the log is full", [&] {
    for (int k = 0; k < 60; ++k) step();
  });
  EXPECT_TRUE(tuner.frozen());
}

TEST(TunerFailures, ACheckWithoutMemoryRefusesTheCandidateForNow) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 0.9};
  job.folder = folder.path();
  const auto decided = [&](Status status) {
    TunerOptions options = job_options(job, 0, nullptr);
    options.check = [status](int, Direction, const Schedule&, const Schedule&) -> TunerCheck {
      throw Error(status, "planted");
    };
    Tuner tuner(options);
    tuner.measured(tuner.schedule(0, Direction::kForward), {10});
    tuner.begin_round();
    return tuner.decisions().at(0).verdict;
  };
  EXPECT_EQ(decided(Status::kOutOfMemory), "refused");
  EXPECT_EQ(lines_of(job, "failed"), 0);
  std::filesystem::remove(journal_of(job));
  EXPECT_EQ(decided(Status::kTimeout), "failed");
  EXPECT_EQ(lines_of(job, "failed"), 1);
}

// The others wait for the rank that has none until they fail. Without such a rank a time-out is the candidate's.
TEST(TunerFailures, ARankWithoutMemoryRefusesForAll) {
  const auto decided = [](Status first, Status second) {
    SharedMailboxes mailboxes(2);
    std::vector<Process> processes;
    for (int rank = 0; rank < 2; ++rank) {
      processes.emplace_back([&, rank](const Reporter& reporter) {
        MadeUpJob job;
        job.factors = {1, 0.9};
        job.ranks = 2;
        TunerOptions options = job_options(job, rank, std::make_shared<SharedExchange>(mailboxes, rank));
        options.check = [=](int, Direction, const Schedule&, const Schedule&) -> TunerCheck {
          throw Error(rank == 0 ? first : second, "planted");
        };
        Tuner tuner(options);
        tuner.measured(tuner.schedule(0, Direction::kForward), {10});
        tuner.begin_round();
        reporter.line(tuner.decisions().at(0).verdict);
      });
    }
    return std::vector{processes[0].line(60), processes[1].line(60)};
  };
  const auto both = [](const std::string& text) { return std::vector(2, text); };
  EXPECT_EQ(decided(Status::kTimeout, Status::kOutOfMemory), both("refused"));
  EXPECT_EQ(decided(Status::kOutOfMemory, Status::kTimeout), both("refused"));
  EXPECT_EQ(decided(Status::kTimeout, Status::kTimeout), both("failed"));
  EXPECT_EQ(decided(Status::kDevice, Status::kOutOfMemory), both("failed"));
}

// A round that is forgotten, with what joined it late and where the folder is lost meanwhile.
TEST(TunerFailures, ANewRoundTriesWhatWasSlowerAgain) {
  MadeUpJob job;
  job.factors = {1, 1.1, 1.1};
  job.steps = 260;
  job.changes_at = 160;
  job.slower_from = 1.2;
  job.compiled_at = {{2, 60}};
  TemporaryFolder folder;
  job.folder = folder.path();
  const JobOutcome late = run_made_up_rank(job, 0, nullptr);
  EXPECT_EQ(late.error, "");
  EXPECT_TRUE(late.mentions("a new round"));
  EXPECT_EQ(std::count(late.decisions.begin(), late.decisions.end(), "slower 1"), 2);
  EXPECT_EQ(std::count(late.decisions.begin(), late.decisions.end(), "slower 2"), 2);

  job.compiled_at.clear();
  job.batch = 1;
  job.folder = folder / "lost";
  MadeUpRank rank(job, 0, nullptr);
  for (int step = 0; step < job.steps; ++step) {
    const bool had = rank.outcome().has("slower 1");
    rank.step();
    if (had || !rank.outcome().has("slower 1")) continue;
    EXPECT_GT(lines_of(job, "slower"), 0);
    std::filesystem::remove_all(job.folder);
    io::write_file(job.folder, "no folder");
  }
  const JobOutcome lost = rank.outcome();
  EXPECT_TRUE(lost.mentions("goes on in memory"));
  EXPECT_TRUE(lost.mentions("a new round"));
  EXPECT_EQ(std::count(lost.decisions.begin(), lost.decisions.end(), "slower 1"), 2);
}

}  // namespace
}  // namespace uniep::test
