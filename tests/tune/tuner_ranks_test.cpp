// 64 tuners in processes of their own, whose ranks have planted faults: all take the same decisions at the same call.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "io/file.h"
#include "support/branch_counts.h"
#include "support/made_up_job.h"
#include "support/processes.h"
#include "support/random_schedule_case.h"
#include "support/shared_exchange.h"
#include "support/temporary_folder.h"

namespace uniep::test {
namespace {

constexpr int kRanks = 64;

// What each rank found, in processes; `of_rank` may change a rank's job.
std::vector<JobOutcome> run_ranks(const MadeUpJob& job, const std::function<void(int, MadeUpJob&)>& of_rank = {},
                                  double seconds = 60) {
  SharedMailboxes mailboxes(job.ranks);
  std::vector<Process> processes;
  for (int rank = 0; rank < job.ranks; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      MadeUpJob own = job;
      if (of_rank) of_rank(rank, own);
      reporter.line(run_made_up_rank(own, rank, std::make_shared<SharedExchange>(mailboxes, rank, seconds)).text());
    });
  }
  std::vector<JobOutcome> outcomes;
  for (Process& process : processes) {
    const std::string line = process.line(120);
    EXPECT_TRUE(line.starts_with('{')) << line;
    outcomes.push_back(line.starts_with('{') ? JobOutcome::parse(line) : JobOutcome());
  }
  return outcomes;
}

void expect_alike(const std::vector<JobOutcome>& outcomes) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].error, "") << "rank " << rank;
    EXPECT_EQ(outcomes[rank].calls_hash, outcomes[0].calls_hash) << "rank " << rank;
    EXPECT_EQ(outcomes[rank].decisions, outcomes[0].decisions) << "rank " << rank;
    EXPECT_EQ(outcomes[rank].decided_at, outcomes[0].decided_at) << "rank " << rank;
    EXPECT_EQ(outcomes[rank].lost, outcomes[0].lost) << "rank " << rank;
  }
}

TEST(TunerRanks, PlantedFaultsEndAsPromisedAndAllRanksDecideAlike) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    MadeUpJob job;
    job.ranks = kRanks;
    job.seed = seed;
    job.steps = 130;
    job.backward = seed == 2;
    // 1: slow; 2: much slower; 3: other bytes on one rank; 4: fails in its check on one; 5: fails in the job on one;
    // 6: one rank never says a time; 7: faster; 8: more memory; 9: no faster.
    job.factors = {1, 1.06, 2.5, 0.7, 0.7, 0.7, 0.7, 0.95, 0.7, 1};
    const int odd = static_cast<int>(7 + 13 * seed);
    job.fails = {{5, odd}};
    job.hangs = {{6, odd + 1}};
    const std::vector<JobOutcome> outcomes = run_ranks(job, [&](int rank, MadeUpJob& own) {
      if (rank == odd) own.wrong = {3};
      if (rank == odd + 2) own.fails_in_check = {4};
      if (rank == 0) own.refused = {8};
    });
    expect_alike(outcomes);
    const JobOutcome& first = outcomes.front();
    EXPECT_EQ(first.incumbent, 7);
    for (const char* const decision :
         {"slower 1", "slower 2", "wrong 3", "failed 4", "failed 5", "failed 6", "taken 7", "refused 8"}) {
      EXPECT_TRUE(first.has(decision)) << decision;
    }
    for (const int never : {3, 4, 8}) EXPECT_EQ(first.used[static_cast<std::size_t>(never)], 0);
    for (const int once : {5, 6}) EXPECT_EQ(first.used[static_cast<std::size_t>(once)], 1);
    EXPECT_LE(first.used[1], 10);
    EXPECT_LE(first.used[2], 4);
    EXPECT_LE(first.lost, job.budget * first.layers);
    for (int rank = 1; rank < kRanks; ++rank) {
      const auto told = [&](const std::string& text) {
        return outcomes[static_cast<std::size_t>(rank)].mentions(text);
      };
      EXPECT_EQ(told("a candidate's call failed here"), rank == odd);
    }
    branches.count("slow", first.has("slower 1"));
    branches.count("much slower", first.has("slower 2"));
    branches.count("wrong bytes on one rank", first.has("wrong 3"));
    branches.count("fails in its check on one rank", first.has("failed 4"));
    branches.count("fails in the job on one rank", first.mentions(fmt::format("failed on rank {}", odd)));
    branches.count("hangs on one rank", first.mentions(fmt::format("no time of its call came from rank {}", odd + 1)));
    branches.count("refused", first.has("refused 8"));
    branches.count("faster", first.has("taken 7"));
    branches.count("no faster", first.has("slower 9"));
    branches.count("with backward", job.backward);
  }
  branches.expect_all_taken();
}

TEST(TunerRanks, ARankWithAnotherCacheFollowsRankZero) {
  TemporaryFolder folder, other;
  MadeUpJob job;
  job.factors = {1, 1.05, 0.9};
  job.steps = 60;
  job.ranks = kRanks;
  job.folder = folder.path();
  const std::vector<JobOutcome> found = run_ranks(job);
  expect_alike(found);
  EXPECT_EQ(found.front().incumbent, 2);
  // Now rank 0 knows it; 5 has no cache, 9 one that knows something else, 11 a damaged one, 12 another budget.
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    std::string text = io::read_text_file(entry.path());
    if (entry.path().extension() != ".json") continue;
    const std::string own = "\"order.raster\": 3", changed = "\"order.raster\": 2";
    const std::size_t at = text.find(own);
    ASSERT_NE(at, std::string::npos) << text;
    text.replace(at, own.size(), changed);
    io::write_file(other / entry.path().filename().string(), text);
  }
  TemporaryFolder damaged;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    io::write_file(damaged / entry.path().filename().string(), "{\"format\": 2");
  }
  const std::vector<JobOutcome> next = run_ranks(job, [&](int rank, MadeUpJob& own) {
    if (rank == 5) own.folder = "";
    if (rank == 9) own.folder = other.path();
    if (rank == 11) own.folder = damaged.path();
    if (rank == 12) own.budget = 0.5;
  });
  expect_alike(next);
  EXPECT_EQ(next.front().incumbent, 2);
  EXPECT_TRUE(next.front().mentions("ranks 5, 9, 11, 12 have another cache, schedule or budget; rank 0's counts"));
  EXPECT_TRUE(next[11].mentions("it is left out"));
}

// On GPUs a forecast depends on the number of tokens and on the forward Schedule, which ranks may have their own of.
TEST(TunerRanks, ForecastsAreRankZerosOnAllRanks) {
  constexpr int kTwo = 2;
  SharedMailboxes mailboxes(kTwo);
  std::vector<Process> processes;
  for (int rank = 0; rank < kTwo; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      ScheduleCase where;
      where.shape = {2048, 768, 128, 8};
      where.machine = {EngineKind::kCuda, kTwo, 132};
      TunerOptions options = job_options({}, rank, std::make_shared<SharedExchange>(mailboxes, rank));
      options.ranks = kTwo;
      options.machine = where.machine;
      TunerLayer& layer = options.layers[0];
      layer.config = {where.shape, where.numerics};
      layer.tokens = 3000 - 900 * rank;
      layer.forward = where.filled();
      where.direction = Direction::kBackward;
      layer.backward = where.filled();
      options.candidates = nullptr;
      options.forecast = nullptr;
      Tuner tuner(options);
      for (int step = 0; step < 20; ++step) {
        if (tuner.wants_round()) tuner.begin_round();
        for (int call = 0; call < 20; ++call) {
          const double rows = 10000 + 700 * call;
          tuner.measured(tuner.schedule(0, Direction::kForward), {rows / 5000, 1.3 * rows, rows});
        }
        tuner.step();
      }
      const TunerSpent spent = tuner.spent();
      reporter.line(fmt::format("{} tried, {} ms lost", spent.tried_calls, spent.lost_milliseconds));
    });
  }
  const std::string first = processes[0].line(60), second = processes[1].line(60);
  EXPECT_EQ(first, second);
  EXPECT_FALSE(first.starts_with("0 ")) << first;
}

// A candidate that is faster on the busy rank and slower on the idle one.
TEST(TunerRanks, TheLongestTimeCountsWhereCallsDoNotWaitForEachOther) {
  for (const bool alone : {false, true}) {
    MadeUpJob job;
    job.ranks = 2;
    job.factors = {1, 1};
    SharedMailboxes mailboxes(job.ranks);
    std::vector<Process> processes;
    for (int rank = 0; rank < job.ranks; ++rank) {
      processes.emplace_back([&, rank](const Reporter& reporter) {
        TunerOptions options = job_options(job, rank, std::make_shared<SharedExchange>(mailboxes, rank));
        options.calls_alone = alone;
        Tuner tuner(options);
        for (int step = 0; step < 60; ++step) {
          if (tuner.wants_round()) tuner.begin_round();
          for (int call = 0; call < 20; ++call) {
            const TunerCall planned = tuner.schedule(0, Direction::kForward);
            const bool candidate = job_number(planned.schedule) == 1;
            const double busy = candidate ? 8 : 10, idle = candidate ? 1.05 : 1;
            tuner.measured(planned, {rank == 1 ? busy : idle, 1000, 1000});
          }
          tuner.step();
        }
        reporter.line(fmt::format("{}", job_number(tuner.incumbent(0, Direction::kForward))));
      });
    }
    for (Process& process : processes) EXPECT_EQ(process.line(60), alone ? "1" : "0");
  }
}

TEST(TunerRanks, OtherLayersAndMissingRanksAreNamedAndNothingHangs) {
  MadeUpJob job;
  job.ranks = 8;
  job.steps = 5;
  SharedMailboxes mailboxes(job.ranks);
  std::vector<Process> processes;
  for (int rank = 0; rank < job.ranks; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      TunerOptions options = job_options(job, rank, std::make_shared<SharedExchange>(mailboxes, rank));
      if (rank == 4) options.layers[0].tokens = 100000;
      reporter.line(reporter.error_of([&] { Tuner tuner(options); }));
    });
  }
  for (Process& process : processes) {
    const std::string line = process.line(60);
    EXPECT_NE(line.find("rank 4 has other layers, another machine or another library than rank 0"), std::string::npos)
        << line;
  }

  // One that ends in the middle. The others, processes of a machine that may have other work, are in time.
  constexpr double kGivesUpSeconds = 3;
  const double begin = monotonic_seconds();
  const std::vector<JobOutcome> outcomes = run_ranks(
      job, [](int rank, MadeUpJob& own) { own.steps -= rank == 3; }, kGivesUpSeconds);
  EXPECT_LT(monotonic_seconds() - begin, 8 * kSlackSeconds);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].error, "") << "rank " << rank;  // what it did not give is asked for a step later
  }
  const std::vector<JobOutcome> earlier = run_ranks(
      job, [](int rank, MadeUpJob& own) { own.steps -= rank == 3 ? 3 : 0; }, kGivesUpSeconds);
  for (std::size_t rank = 0; rank < earlier.size(); ++rank) {
    EXPECT_EQ(earlier[rank].error, rank == 3 ? "" : "exchange: rank 3 gave nothing") << "rank " << rank;
  }

  // One that makes other calls.
  for (const JobOutcome& outcome : run_ranks(job, [](int rank, MadeUpJob&own) { own.calls += rank == 2; })) {
    EXPECT_NE(outcome.error.find("rank 2 made other calls of the layers than rank 0"), std::string::npos)
        << outcome.error;
  }
}

}  // namespace
}  // namespace uniep::test
