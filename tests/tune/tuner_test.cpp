// A tuner inside a job whose times are made up, so that it is known what it has to find: one process.
#include "uniep/tuner.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "io/file.h"
#include "support/branch_counts.h"
#include "support/expect_error.h"
#include "support/made_up_job.h"
#include "support/random_schedule_case.h"
#include "support/temporary_folder.h"
#include "tune/online_search.h"
#include "tune/tuned.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

JobOutcome run_alone(const MadeUpJob& job) {
  JobOutcome outcome = run_made_up_rank(job, 0, nullptr);
  EXPECT_EQ(outcome.error, "");
  return outcome;
}

// The step in which something was decided, and after how many pairs; 0, where it was not.
std::pair<int64_t, int> decided(const JobOutcome& outcome, const std::string& decision) {
  for (std::size_t i = 0; i < outcome.decisions.size(); ++i) {
    if (outcome.decisions[i] == decision) return {outcome.decided_at[i], outcome.pairs[i]};
  }
  return {0, 0};
}

TEST(Tuner, FindsTheFastestOfRandomCandidatesAndStaysInItsBudget) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    RandomBits random(seed);
    MadeUpJob job;
    job.seed = seed;
    job.steps = 300;
    job.backward = below(random, 2) == 0;
    job.noise = 0.005 + 0.001 * below(random, 20);
    const int count = 3 + below(random, 9);
    for (int i = 1; i < count; ++i) job.factors.push_back(1 + 0.001 * below(random, 100));
    const bool faster = below(random, 3) > 0, gross = below(random, 3) == 0;
    const int best = 1 + below(random, static_cast<std::size_t>(count - 1));
    if (faster) job.factors[static_cast<std::size_t>(best)] = 0.94;
    const int gross_one = 1 + best % (count - 1);
    if (gross) job.factors[static_cast<std::size_t>(gross_one)] = 2;
    if (gross_one == best && gross) continue;
    const JobOutcome outcome = run_alone(job);
    EXPECT_EQ(outcome.incumbent, faster ? best : 0) << "seed " << seed;
    // One candidate's first pair, or one round's checks, are lent.
    EXPECT_LE(outcome.most_over, 12 + (gross ? 26 : 0)) << "seed " << seed;
    EXPECT_LE(outcome.lost, job.budget * outcome.layers) << "seed " << seed;
    bool slower = false, no_faster = false;
    for (std::size_t i = 0; i < outcome.decisions.size(); ++i) {
      const int number = std::stoi(outcome.decisions[i].substr(outcome.decisions[i].rfind(' ') + 1));
      const double factor = job.factors[static_cast<std::size_t>(number)];
      if (outcome.decisions[i].starts_with("taken")) {
        EXPECT_LT(factor, 0.995) << "seed " << seed;
        EXPECT_GE(outcome.pairs[i], 32);
      } else if (factor >= 2) {
        EXPECT_LE(outcome.pairs[i], 4) << "seed " << seed;
      } else {
        slower |= outcome.pairs[i] >= 8 && outcome.pairs[i] < 32;
        no_faster |= outcome.pairs[i] >= 32;
      }
    }
    branches.count("one is taken", faster && outcome.has("taken " + std::to_string(best)));
    branches.count("none is taken", outcome.incumbent == 0);
    branches.count("grossly slower: out early", gross && outcome.has("slower " + std::to_string(gross_one)));
    branches.count("slower: out after 8 pairs", slower);
    branches.count("no faster: out after 32 pairs or more", no_faster);
    branches.count("several rounds", outcome.rounds > 1);
    branches.count("nothing is left to try", outcome.mentions("nothing is left to try"));
    branches.count("with backward", job.backward);
    branches.count("without backward", !job.backward);
  }
  branches.expect_all_taken();
}

TEST(Tuner, NeverTakesWhatIsNoFaster) {
  int pairs = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    MadeUpJob job;
    job.seed = seed;
    job.noise = 0.03;
    job.factors = {1, 1, 0.999, 1.001, 1};
    const JobOutcome outcome = run_alone(job);
    EXPECT_EQ(outcome.incumbent, 0) << "seed " << seed;
    for (const int of_one : outcome.pairs) pairs += of_one >= 32;
  }
  EXPECT_GT(pairs, 100);
}

TEST(Tuner, FaultyCandidatesAreOut) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 0.8, 0.8, 0.8, 0.8, 0.8, 0.9};
  job.steps = 150;
  job.wrong = {1};
  job.fails_in_check = {2};
  job.refused = {3};
  job.fails = {{4, 0}};
  job.hangs = {{5, 0}};
  job.folder = folder.path();
  const JobOutcome outcome = run_alone(job);
  EXPECT_EQ(outcome.incumbent, 6);
  EXPECT_TRUE(outcome.has("wrong 1"));
  EXPECT_TRUE(outcome.has("failed 2"));
  EXPECT_TRUE(outcome.has("refused 3"));
  EXPECT_TRUE(outcome.has("failed 4"));
  EXPECT_TRUE(outcome.has("failed 5"));
  for (const int unproven : {1, 2, 3}) EXPECT_EQ(outcome.used[static_cast<std::size_t>(unproven)], 0);
  for (const int once : {4, 5}) EXPECT_EQ(outcome.used[static_cast<std::size_t>(once)], 1);
  EXPECT_TRUE(outcome.mentions("rank 1 waits for rank 0"));
  EXPECT_TRUE(outcome.mentions("its call failed on rank 0"));
  EXPECT_TRUE(outcome.mentions("no time of its call came from rank 0"));

  // The next job begins with what was found, and leaves out what was faulty.
  job.wrong.clear();
  job.fails_in_check.clear();
  job.fails.clear();
  job.hangs.clear();
  const JobOutcome next = run_alone(job);
  EXPECT_EQ(next.incumbent, 6);
  for (const int out : {0, 1, 2, 4, 5}) EXPECT_EQ(next.used[static_cast<std::size_t>(out)] == 0, out != 0) << out;
  EXPECT_TRUE(next.mentions("left out: order.raster=2"));
}

TEST(Tuner, ACandidateThatEndedTheProgramIsNotTriedAgain) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 0.9, 0.95};
  job.steps = 100;
  job.folder = folder.path();
  // Its first call in the job ends the process, with nothing cleaned up.
  const int killed = [&] {
    const pid_t child = ::fork();
    if (child == 0) {
      MadeUpRank rank(job, 0, nullptr);
      for (;;) {
        if (rank.outcome().used[1] > 0) ::_exit(0);
        rank.step();
      }
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status;
  }();
  EXPECT_EQ(killed, 0);
  const JobOutcome next = run_alone(job);
  EXPECT_EQ(next.incumbent, 2);
  EXPECT_EQ(next.used[1], 0);
  EXPECT_TRUE(next.mentions("the program ended while this was tried"));
}

// Two ranks of which the other says what this one says, until it is gone.
class Echo : public TunerExchange {
 public:
  void give(int64_t number, std::span<const std::byte> own) override { given_[number].assign(own.begin(), own.end()); }
  std::vector<std::vector<std::byte>> take(int64_t number) override {
    if (is_gone) throw Error(Status::kTimeout, "rank 1 did not come");
    return {given_.at(number), given_.at(number)};
  }
  bool is_gone = false;

 private:
  std::map<int64_t, std::vector<std::byte>> given_;
};

TEST(Tuner, ACandidateThatEndedAnotherRankIsNotTriedAgain) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 0.9, 0.95};
  job.ranks = 2;
  job.folder = folder.path();
  {
    const auto exchange = std::make_shared<Echo>();
    MadeUpRank rank(job, 0, exchange);
    while (rank.outcome().used[1] == 0) rank.step();
    exchange->is_gone = true;
    EXPECT_THROW(rank.step(), Error);
  }
  const JobOutcome next = run_made_up_rank(job, 0, std::make_shared<Echo>());
  EXPECT_EQ(next.error, "");
  EXPECT_EQ(next.used[1], 0);
  EXPECT_TRUE(next.mentions("the program ended while this was tried"));
}

TEST(Tuner, WhatIsLeftOutStaysOutInLaterRoundsAndJobs) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 1.1, 1.1};
  job.folder = folder.path();
  const tune::TunedFolder cache(folder.path());
  const TunerOptions options = job_options(job, 0, nullptr);
  const TunerLayer& layer = options.layers[0];
  const std::filesystem::path file = cache
                                         .path({options.machine_name, 1, layer.config.shape, layer.config.numerics,
                                                Direction::kForward, tune::token_bucket(layer.tokens), ""})
                                         .replace_extension(".online");
  io::write_file(file, "untried\t" + to_text(job_schedule(1)) + "\t\n");
  job.steps = 160;
  job.changes_at = 100;
  job.slower_from = 1.2;
  const JobOutcome first = run_alone(job);
  EXPECT_TRUE(first.mentions("nothing is left to try"));
  EXPECT_TRUE(first.mentions("a new round"));
  EXPECT_EQ(std::count(first.decisions.begin(), first.decisions.end(), "slower 2"), 2);
  const JobOutcome second = run_alone(job);
  for (const JobOutcome* const outcome : {&first, &second}) {
    EXPECT_EQ(outcome->used[1], 0);
    EXPECT_EQ(std::count_if(outcome->log.begin(), outcome->log.end(),
                            [](const std::string& line) { return line.find("left out") != std::string::npos; }),
              1);
  }
}

TEST(Tuner, GroupsOfAJobKeepAndHeedEachOthersFailures) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 1.1, 1.1, 1.1};
  job.batch = 1;
  job.groups = 2;
  job.folder = folder.path();
  MadeUpJob other = job;
  other.group = 1;
  job.wrong = {1};
  other.wrong = {3};
  {
    MadeUpRank first(job, 0, nullptr), second(other, 0, nullptr);
    for (int step = 0; step < 80; ++step) {
      first.step();
      second.step();
    }
    EXPECT_TRUE(first.outcome().has("wrong 1"));
    EXPECT_TRUE(second.outcome().has("wrong 3"));
  }
  job.wrong.clear();
  other.wrong.clear();
  MadeUpJob alone = job;
  alone.groups = 1;
  for (const MadeUpJob& next : {job, other, alone}) {
    const JobOutcome outcome = run_alone(next);
    EXPECT_EQ(outcome.used[1] + outcome.used[3], 0) << next.group;
    EXPECT_GT(outcome.used[2], 0) << next.group;
  }
}

TEST(Tuner, AnIncumbentWhoseCallFailsGoesBackToTheOneBefore) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 0.9, 1.1};
  job.folder = folder.path();
  EXPECT_EQ(run_alone(job).incumbent, 1);
  // The next job begins with it, and there it fails.
  MadeUpJob failing = job;
  failing.fails = {{1, 0}};
  const JobOutcome second = run_alone(failing);
  EXPECT_EQ(second.incumbent, 0);
  EXPECT_TRUE(second.has("failed 1"));
  EXPECT_TRUE(second.mentions("a call of the incumbent failed on rank 0"));
  EXPECT_LE(second.used[1], 3 * job.calls);  // until it was agreed on
  const JobOutcome third = run_alone(job);
  EXPECT_EQ(third.incumbent, 0);
  EXPECT_EQ(third.used[1], 0);
  // What a job was given stays, whatever fails.
  failing.fails = {{0, 0}};
  failing.folder = "";
  EXPECT_EQ(run_alone(failing).decisions, std::vector<std::string>());
}

TEST(Tuner, AKeptScheduleThatFailedIsNotBegunWith) {
  TemporaryFolder folder;
  MadeUpJob job;
  job.factors = {1, 0.9, 1.1};
  job.folder = folder.path();
  EXPECT_EQ(run_alone(job).incumbent, 1);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (entry.path().extension() != ".json") continue;
    std::filesystem::path journal = entry.path();
    io::write_file(journal.replace_extension(".online"), "failed\t" + to_text(job_schedule(1)) + "\twhy\n");
  }
  const JobOutcome next = run_alone(job);
  EXPECT_EQ(next.incumbent, 0);
  EXPECT_EQ(next.used[1], 0);
}

TEST(Tuner, AnEndInTheMiddleIsNoFaultOfACandidate) {
  BranchCounts branches;
  for (int steps = 1; steps <= 24; ++steps) {
    TemporaryFolder folder;
    MadeUpJob job;
    job.factors = {1, 0.9, 1.1, 1.2};
    job.folder = folder.path();
    job.steps = steps;
    const JobOutcome first = run_alone(job);
    job.steps = 150;
    const JobOutcome next = run_alone(job);
    EXPECT_EQ(next.incumbent, 1) << steps << " steps";
    EXPECT_FALSE(next.mentions("left out")) << steps << " steps";
    branches.count("ended before a candidate's first call", first.used[1] == 0);
    branches.count("ended while one is tried", first.used[1] > 0 && first.incumbent == 0);
    branches.count("ended after one was taken", first.incumbent == 1);
    branches.count("begins with what was found", next.used[0] == 0);
  }
  branches.expect_all_taken();
}

TEST(Tuner, DriftAndSkewBeginANewRound) {
  for (const bool drift : {true, false}) {
    MadeUpJob job;
    job.factors = {1, 1.1, 1.1};
    job.steps = 160;
    job.changes_at = 100;
    (drift ? job.slower_from : job.skew_from) = drift ? 1.2 : 3;
    const JobOutcome outcome = run_alone(job);
    EXPECT_TRUE(outcome.mentions(drift ? "a new round: calls take 1." : "a new round: the busiest rank has"));
    const auto tried = std::count(outcome.decisions.begin(), outcome.decisions.end(), "slower 1");
    EXPECT_EQ(tried, 2);
    job.changes_at = 0;
    EXPECT_FALSE(run_alone(job).mentions("a new round"));
  }
}

TEST(Tuner, DecidesOnWhatIsTwoStepsOld) {
  MadeUpJob job;
  job.factors = {1, 3};
  job.calls = 40;
  MadeUpRank rank(job, 0, nullptr);
  std::vector<int> used;
  for (int step = 0; step < 8; ++step) {
    rank.step();
    used.push_back(rank.outcome().used[1]);
  }
  // Step 1: what a call takes; agreed on at the end of step 3. Step 4: the first pair; agreed on at the end of step 6.
  EXPECT_EQ(used, (std::vector<int>{0, 0, 0, 1, 1, 1, 2, 2}));
}

TEST(Tuner, NothingChangesAfterTheLastStepToTuneIn) {
  MadeUpJob job;
  job.factors = {1, 0.9, 0.8};
  job.until = 4;
  const JobOutcome outcome = run_alone(job);
  EXPECT_EQ(outcome.incumbent, 0);
  EXPECT_LE(outcome.used[1] + outcome.used[2], 2);
  EXPECT_TRUE(outcome.mentions("step 4: frozen"));
  job.until = 0;
  EXPECT_EQ(run_alone(job).incumbent, 2);
}

TEST(Tuner, ACapturedCallKeepsTheIncumbentAndTheLogSaysSoOnce) {
  MadeUpJob job;
  MadeUpRank rank(job, 0, nullptr);
  EXPECT_EQ(rank.tuner().schedule_to_keep(0, Direction::kForward), job_schedule(0));
  rank.tuner().schedule_to_keep(0, Direction::kForward);
  EXPECT_EQ(rank.outcome().log.size(), 1u);
}

TEST(Tuner, GroupsOfAJobShareWhatTheyMeasured) {
  MadeUpJob job;
  job.factors = {1, 1.1, 1.1, 1.1, 0.9, 1.1, 1.1, 1.1};
  job.batch = 2;
  job.groups = 2;
  MadeUpJob other = job;
  other.group = 1;
  other.wrong = {5};
  other.seed = 2;
  MadeUpRank first(job, 0, nullptr), second(other, 0, nullptr);
  int64_t taken_at = 0;
  for (int step = 1; step <= 80; ++step) {
    first.step();
    second.step();
    const std::vector<std::byte> a = first.tuner().results(), b = second.tuner().results();
    first.tuner().add_results(b);
    second.tuner().add_results(a);
    if (taken_at == 0 && first.outcome().incumbent == 4) taken_at = step;
  }
  EXPECT_EQ(first.outcome().incumbent, 4);
  EXPECT_EQ(second.outcome().incumbent, 4);
  // The second group begins with it; the first one finds it there.
  EXPECT_GT(second.outcome().used[4], 32);
  EXPECT_LT(decided(second.outcome(), "taken 4").first, decided(first.outcome(), "taken 4").first);
  // What gave other bits there is not tried here.
  EXPECT_TRUE(second.outcome().has("wrong 5"));
  EXPECT_EQ(first.outcome().used[5], 0);
  MadeUpRank alone(job, 0, nullptr);
  for (int step = 1; step <= taken_at; ++step) alone.step();
  EXPECT_NE(alone.outcome().incumbent, 4);
}

TEST(Tuner, ANewRoundForgetsWhatWasMeasuredBefore) {
  MadeUpJob job;
  job.factors = {1, 1.1, 1.1};
  job.changes_at = 100;
  job.slower_from = 1.2;
  MadeUpRank rank(job, 0, nullptr);
  std::size_t before = 0, after = 0;
  for (int step = 0; step < 160 && after == 0; ++step) {
    before = rank.tuner().results().size();
    rank.step();
    if (rank.outcome().mentions("a new round")) after = rank.tuner().results().size();
  }
  EXPECT_GT(after, 0u);
  EXPECT_LT(after + 100, before);  // the Schedules' texts alone are longer
}

// What is faster in other groups is taken, and what is slower there left, only where own pairs say the same.
TEST(OnlineSearch, OtherGroupsPairsDoNotDecideAlone) {
  const auto outcome = [](double own, double others) {
    tune::OnlineSearch search(job_schedule(0));
    search.begin_round({job_schedule(1)}, true);
    std::size_t pairs = 0;
    for (int step = 0; step < 200 && search.candidates()[0].verdict == tune::Verdict::kInTheRunning; ++step) {
      for (int call = 0; call < 8; ++call) {
        const tune::PlannedCall planned = search.next_call();
        search.apply(planned, {.milliseconds = planned.of_candidate ? own : 1});
      }
      search.candidate(0).others.assign(64, others);
      pairs = std::max(pairs, search.candidates()[0].ratios.size());
      double allowed = 1e6;
      bool first_use = false;
      search.decide(allowed, 8, first_use);
    }
    return std::pair(search.incumbent() == job_schedule(1), pairs);
  };
  const auto taken = outcome(0.9, 0.9), slower_here = outcome(1.1, 0.9), faster_here = outcome(0.9, 1.1);
  EXPECT_TRUE(taken.first);
  EXPECT_GE(taken.second, 8u);
  EXPECT_LT(taken.second, 32u);
  EXPECT_FALSE(slower_here.first);
  EXPECT_GT(faster_here.second, 32u);  // not dropped for what others say
}

TEST(Tuner, ResultsThatAreNoneAreRefused) {
  MadeUpJob job;
  job.factors = {1, 0.9};
  MadeUpRank rank(job, 0, nullptr);
  for (int step = 0; step < 30; ++step) rank.step();
  const std::vector<std::byte> good = rank.tuner().results();
  MadeUpRank other(job, 0, nullptr);
  other.tuner().add_results(good);
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_THROW(other.tuner().add_results(std::span(good).first(size)), Error) << size;
  }
  const auto other_numerics = [&](const std::function<void(Numerics&)>& change) {
    TunerOptions options = job_options(job, 0, nullptr);
    change(options.layers[0].config.numerics);
    Tuner stranger(options);
    EXPECT_THROW(stranger.add_results(good), Error);
  };
  other_numerics([](Numerics& numerics) { numerics.activation = Activation::kRelu2; });
  other_numerics([](Numerics& numerics) { numerics.alpha = 2; });
  other_numerics([](Numerics& numerics) { numerics.bias = true; });
  other_numerics([](Numerics& numerics) { numerics.router_weight = RouterWeight::kOutput; });
  RandomBits random(1);
  int refused = 0, kept = 0;
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::byte> bad = good;
    for (int k = 0; k < 1 + below(random, 4); ++k) bad[random() % bad.size()] ^= static_cast<std::byte>(random());
    try {
      other.tuner().add_results(bad);
      ++kept;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(kept, 10);  // another ratio is one, too
  for (int step = 0; step < 10; ++step) other.step();
}

TEST(Tuner, BadOptionsAreRefused) {
  MadeUpJob job;
  const auto refused = [&](const std::function<void(TunerOptions&)>& change, const std::string& text) {
    TunerOptions options = job_options(job, 0, nullptr);
    change(options);
    expect_error(Status::kInvalidArgument, text, [&] { Tuner tuner(options); });
  };
  refused([](TunerOptions& o) { o.ranks = 0; }, "ranks: 0");
  refused([](TunerOptions& o) { o.rank = 3; }, "rank: 3");
  refused([](TunerOptions& o) { o.ranks = 2; }, "exchange: null");
  refused([](TunerOptions& o) { o.check = nullptr; }, "check: null");
  refused([](TunerOptions& o) { o.layers.clear(); }, "layers: none");
  refused([](TunerOptions& o) { o.budget = -0.1; }, "budget: -0.1");
  refused([](TunerOptions& o) { o.budget = std::nan(""); }, "budget: nan");
  refused([](TunerOptions& o) { o.until = -1; }, "until: -1");
  refused([](TunerOptions& o) { o.batch = 0; }, "batch: 0");
  refused([](TunerOptions& o) { o.groups = 0; }, "groups: 0");
  refused([](TunerOptions& o) { o.group = 1; }, "group: 1");
  refused([](TunerOptions& o) { o.folder = "x", o.machine_name = ""; }, "machine_name: empty");
  for (const char* name : {"gpu\xff", "\xc3", "\x80", "a\xed\xa0\x80"}) {
    refused([&](TunerOptions& o) { o.folder = "x", o.machine_name = name; }, "machine_name: '");
  }
  refused([](TunerOptions& o) { o.machine.processes = true, o.machine.ranks = 2; },
          "ranks: 1; the machine has a process for each of 2 ranks, which tune together: must be 2");
  refused([](TunerOptions& o) { o.layers[0].forward.order.raster = 0; }, "layers[0].forward: ");
  refused([](TunerOptions& o) { o.layers[0].tokens = -1; }, "layers[0].tokens: -1; must be 0 to 1099511627776");
  refused([](TunerOptions& o) { o.layers[0].tokens = (int64_t{1} << 40) + 1; }, "layers[0].tokens: 1099511627777");
  Tuner tuner(job_options(job, 0, nullptr));
  expect_error(Status::kInvalidArgument, "layer: 1; must be 0 to 0", [&] { tuner.schedule(1, Direction::kForward); });
  const TunerCall call = tuner.schedule(0, Direction::kForward);
  expect_error(Status::kInvalidArgument, "milliseconds: 0", [&] { tuner.measured(call, {0}); });
}

TEST(Tuner, ADiskThatIsFullEndsTheFolderNotTheTuner) {
  MadeUpJob job;
  job.factors = {1, 0.9};
  job.folder = "/proc/uniep";  // where nothing can be made
  const JobOutcome outcome = run_alone(job);
  EXPECT_EQ(outcome.incumbent, 1);
  EXPECT_EQ(std::count_if(outcome.log.begin(), outcome.log.end(),
                          [](const std::string& line) { return line.find("goes on in memory") != std::string::npos; }),
            1);
}

}  // namespace
}  // namespace uniep::test
