// Candidates whose kernels are compiled in the background of a made-up job: they join once all ranks have them.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "support/branch_counts.h"
#include "support/made_up_job.h"
#include "support/processes.h"
#include "support/random_schedule_case.h"
#include "support/shared_exchange.h"

namespace uniep::test {
namespace {

constexpr int kNever = MadeUpJob::kNever;

TEST(TunerBackground, TheJobGoesOnAndACandidateJoinsWhenItIsCompiled) {
  MadeUpJob job;
  // 1 needs no compilation, 2 is compiled at step 40, 3 never, 4 does not compile; 5 to 8 need none.
  job.factors = {1, 1.1, 0.9, 0.5, 0.5, 1.1, 1.1, 1.1, 0.95};
  job.compiled_at = {{2, 40}, {3, kNever}, {4, 10}};
  job.never_compiles = {4};
  job.steps = 39;
  const JobOutcome before = run_made_up_rank(job, 0, nullptr);
  EXPECT_TRUE(before.mentions("3 candidates wait for kernels that are compiled in the background, 6 on rank 0"));
  EXPECT_GT(before.used[1], 0);
  EXPECT_GT(before.used[5], 0);  // of a round begun meanwhile
  EXPECT_TRUE(before.has("failed 4"));
  EXPECT_TRUE(before.mentions("the compiler says no"));
  EXPECT_EQ(before.used[2] + before.used[3] + before.used[4], 0);
  EXPECT_EQ(std::accumulate(before.used.begin(), before.used.end(), 0), job.steps * job.calls);

  job.steps = 200;
  const JobOutcome after = run_made_up_rank(job, 0, nullptr);
  EXPECT_EQ(after.error, "");
  EXPECT_EQ(after.early, 0);
  EXPECT_EQ(after.incumbent, 2);
  EXPECT_EQ(after.used[3], 0);
  EXPECT_TRUE(after.mentions("compiled on all ranks: "));
  EXPECT_TRUE(after.mentions("nothing is left to try"));
  EXPECT_LE(after.lost, job.budget * after.layers);
}

TEST(TunerBackground, WhatIsNeverCompiledGivesItsPlaceBack) {
  MadeUpJob job;
  job.batch = 1;
  job.factors = {1, 0.5, 0.9};
  job.compiled_at = {{1, kNever}};
  job.calls = 400;
  job.steps = 250;  // of 4 s
  const JobOutcome outcome = run_made_up_rank(job, 0, nullptr);
  EXPECT_TRUE(outcome.has("refused 1"));
  EXPECT_TRUE(outcome.mentions("its kernels are not compiled after 600 s of the layers"));
  EXPECT_EQ(outcome.used[1], 0);
  EXPECT_EQ(outcome.incumbent, 2);
}

TEST(TunerBackground, AFrozenTunerWaitsForNothing) {
  MadeUpJob job;
  job.factors = {1, 0.5};
  job.compiled_at = {{1, 20}};
  job.until = 10;
  const JobOutcome outcome = run_made_up_rank(job, 0, nullptr);
  EXPECT_EQ(outcome.incumbent, 0);
  EXPECT_EQ(outcome.used[1], 0);
}

TEST(TunerBackground, WhatFailedInAnotherGroupNeverJoins) {
  MadeUpJob job;
  job.factors = {1, 0.5, 1.1};
  job.compiled_at = {{1, 20}};
  job.groups = 2;
  MadeUpJob other = job;
  other.group = 1;
  other.compiled_at = {};
  other.wrong = {1};
  MadeUpRank first(job, 0, nullptr), second(other, 0, nullptr);
  for (int step = 0; step < 60; ++step) {
    first.step();
    second.step();
    first.tuner().add_results(second.tuner().results());
  }
  EXPECT_TRUE(second.outcome().has("wrong 1"));
  EXPECT_EQ(first.outcome().used[1], 0);
  EXPECT_FALSE(first.outcome().mentions("compiled on all ranks"));
}

TEST(TunerBackground, RanksThatAreReadyAtOtherTimesDecideAlike) {
  constexpr int kRanks = 8;
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    RandomBits random(seed);
    MadeUpJob job;
    job.ranks = kRanks;
    job.seed = seed;
    job.steps = 150;
    job.backward = below(random, 2) == 0;
    job.batch = 2 + below(random, 3);
    const int count = 5 + below(random, 4);
    for (int i = 1; i < count; ++i) job.factors.push_back(1 + 0.01 * below(random, 10));
    std::vector<int> last(static_cast<std::size_t>(count)), failing(static_cast<std::size_t>(count), -1);
    std::vector<std::map<int, int>> at(kRanks);
    for (int i = 1; i < count; ++i) {
      if (below(random, 3) == 0) continue;
      const int straggler = below(random, 4) == 0 ? below(random, kRanks) : -1;
      if (below(random, 4) == 0) failing[static_cast<std::size_t>(i)] = below(random, 2) * below(random, kRanks);
      for (int rank = 0; rank < kRanks; ++rank) {
        const int own = rank == straggler ? kNever : below(random, 30);
        at[static_cast<std::size_t>(rank)][i] = own;
        last[static_cast<std::size_t>(i)] = std::max(last[static_cast<std::size_t>(i)], own);
      }
    }
    job.compiled_at[count] = 0;  // none: but all ranks are asked
    SharedMailboxes mailboxes(kRanks);
    std::vector<Process> processes;
    for (int rank = 0; rank < kRanks; ++rank) {
      processes.emplace_back([&, rank](const Reporter& reporter) {
        MadeUpJob own = job;
        own.compiled_at.insert(at[static_cast<std::size_t>(rank)].begin(), at[static_cast<std::size_t>(rank)].end());
        for (int i = 1; i < count; ++i) {
          if (failing[static_cast<std::size_t>(i)] == rank) own.never_compiles.insert(i);
        }
        reporter.line(run_made_up_rank(own, rank, std::make_shared<SharedExchange>(mailboxes, rank, 10)).text());
      });
    }
    std::vector<JobOutcome> outcomes;
    for (Process& process : processes) outcomes.push_back(JobOutcome::parse(process.line(120)));
    const JobOutcome& first = outcomes.front();
    for (int rank = 0; rank < kRanks; ++rank) {
      const JobOutcome& own = outcomes[static_cast<std::size_t>(rank)];
      EXPECT_EQ(own.error, "") << "seed " << seed << " rank " << rank;
      EXPECT_EQ(own.early, 0) << "seed " << seed << " rank " << rank;
      EXPECT_EQ(own.calls_hash, first.calls_hash) << "seed " << seed << " rank " << rank;
      EXPECT_EQ(own.decisions, first.decisions) << "seed " << seed << " rank " << rank;
      EXPECT_EQ(own.decided_at, first.decided_at) << "seed " << seed << " rank " << rank;
    }
    for (int i = 1; i < count; ++i) {
      const auto one = static_cast<std::size_t>(i);
      const bool fails = first.has("failed " + std::to_string(i));
      EXPECT_FALSE(fails && failing[one] < 0) << "seed " << seed;
      EXPECT_FALSE((last[one] == kNever || failing[one] >= 0) && first.used[one] > 0) << "seed " << seed;
      branches.count("needs no compilation", at[0].count(i) == 0 && first.used[one] > 0);
      branches.count("joins later", last[one] > 5 && first.used[one] > 0);
      branches.count("never on one rank", last[one] == kNever && first.used[one] == 0);
      branches.count("fails on rank 0", fails && failing[one] == 0);
      branches.count("fails on another rank", fails && failing[one] > 0);
    }
    if (HasFailure()) return;
    branches.count("with backward", job.backward);
    branches.count("without backward", !job.backward);
  }
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::test
