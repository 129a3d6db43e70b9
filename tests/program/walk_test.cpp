#include "program/walk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "support/branch_counts.h"
#include "support/built_program.h"
#include "support/plain_counters.h"
#include "support/walked.h"

// The walker against the lists and against the CUDA engine's way through them, agents taking turns at random.
namespace uniep::test {
namespace {

using TaskKey = std::tuple<int, int32_t, int32_t, int32_t>;
TaskKey key(const Task& task) {
  return {static_cast<int>(task.stage), task.expert, task.m, task.n};
}

std::vector<TaskKey> sorted(const std::vector<Task>& tasks) {
  std::vector<TaskKey> keys;
  keys.reserve(tasks.size());
  for (const Task& task : tasks) keys.push_back(key(task));
  std::sort(keys.begin(), keys.end());
  return keys;
}

std::vector<Task> all_listed(const RankProgram& p) {
  std::vector<Task> tasks;
  for (int launch = 0; launch < p.launches; ++launch) {
    for (int kind = 0; kind < kListKinds; ++kind) {
      const int64_t length = list_length(p, launch, static_cast<ListKind>(kind));
      for (int64_t i = 0; i < length; ++i) {
        const Task task = list_task(p, launch, static_cast<ListKind>(kind), i);
        if (task.has_tile()) tasks.push_back(task);
      }
    }
  }
  return tasks;
}

BuiltProgram build_walked(uint64_t seed) {
  const char* const fixed = seed % 5 == 0   ? "fusion=layer,order.interleave=mixed,queue=dynamic"
                            : seed % 5 == 1 ? "tile.cluster=2"
                            : seed % 5 == 2 ? "backward.wgrad=mixed"
                                            : "auto";
  return build(seed, seed % 2 == 0 ? Direction::kForward : Direction::kBackward, {}, PartialSchedule::parse(fixed),
               seed % 5 == 1 ? 4 : 0);
}

TEST(Walk, EveryTaskIsTakenOnceByWhoeverComes) {
  BranchCounts branches;
  std::mt19937_64 random(7);
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const BuiltProgram built = build_walked(seed);
    for (int rank = 0; rank < built.program->ranks(); ++rank) {
      const RankProgram& p = built.program->rank(rank);
      const Walked walked = walk_rank(p, random);
      ASSERT_EQ(sorted(walked.all), sorted(all_listed(p))) << built.text << "\nrank " << rank;
      branches.count("static queues", !p.dynamic);
      branches.count("tickets", p.dynamic);
      branches.count("the queues of mixed GEMMs", has_gemm_queues(p, 0));
      branches.count("the queues of dgrads and weight gradients", has_wgrad_queues(p, 0));
      branches.count("weight gradients beside dgrads", has_wgrad_queues(p, 0) && wgrad_queues(p, 0).takers > 0);
      branches.count("pairs", walked.pairs > 0);
      branches.count("several launches", p.launches > 1);
      branches.count("workers that join late", p.late_position > 0);
    }
  }
  branches.expect_all_taken();
}

// As transfer/copy_agent.h and schedule/layer_scheduler.h go through static queues: even_position() for copies and
// sums, and static_position() with a cursor a CTA for products.
TEST(Walk, StaticSharesAreThoseOfTheCudaEngine) {
  std::mt19937_64 random(7);
  int64_t compared = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const BuiltProgram built = build_walked(seed);
    const RankProgram& p = built.program->rank(0);
    if (p.dynamic) continue;
    const Walked walked = walk_rank(p, random);
    for (int worker = 0; worker < p.workers; ++worker) {
      for (const AgentRole role : {AgentRole::kCopy, AgentRole::kCompute}) {
        std::vector<TaskKey> expected, got;
        for (int launch = 0; launch < p.launches; ++launch) {
          for (int kind = 0; kind < kListKinds; ++kind) {
            const ListKind list = static_cast<ListKind>(kind);
            if (!walks_list(p, launch, worker, role, list)) continue;
            const Participants who = participants_of(p, launch, list);
            ListCursor cursor;
            for (int64_t index = 0;; ++index) {
              const int64_t position = list == ListKind::kCompute ? static_position(p, who, worker, index)
                                                                  : even_position(who, worker, index);
              if (position >= list_length(p, launch, list)) break;
              const Task task = list_task(p, launch, list, position, cursor);
              if (task.has_tile()) expected.push_back(key(task));
            }
          }
        }
        for (const Task& task : walked.of_agent[worker * 2 + static_cast<int>(role)]) got.push_back(key(task));
        ASSERT_EQ(got, expected) << built.text << "\nworker " << worker;
        compared += static_cast<int64_t>(got.size());
      }
    }
  }
  EXPECT_GT(compared, 10000);
}

TEST(Walk, SumsOfAFewTokensCoverEveryTokenOnceAChunk) {
  int64_t items = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const BuiltProgram built = build_walked(seed);
    const RankProgram& p = built.program->rank(0);
    const int launch = [&] {
      for (int l = 0;; ++l) {
        if (p.stages[l].combine) return l;
      }
    }();
    for (const int32_t tokens_at_once : {1, kCudaSumTokens, kTokenBlock}) {
      std::vector<int> summed(static_cast<std::size_t>(p.tokens) * p.chunks, 0);
      std::map<int64_t, int64_t> counters;
      for (int worker = 0; worker < p.workers; ++worker) {
        ListWalk walk(p, launch, ListKind::kReduce, worker, {.sum_tokens = tokens_at_once});
        while (walk.next(PlainCounters{counters})) {
          const TokenRange tokens = walk.tokens();
          ASSERT_LT(tokens.begin, tokens.end);
          ASSERT_LE(tokens.end - tokens.begin, tokens_at_once);
          ASSERT_EQ(walk.task().m, tokens.begin / kTokenBlock);
          ASSERT_EQ(walk.task().m, (tokens.end - 1) / kTokenBlock);
          for (int32_t token = tokens.begin; token < tokens.end; ++token) {
            ++summed[static_cast<std::size_t>(walk.task().n) * p.tokens + token];
          }
          ++items;
        }
      }
      for (const int times : summed) ASSERT_EQ(times, 1) << built.text;
    }
  }
  EXPECT_GT(items, 1000);
}

TEST(Walk, AgentsThatShareAWorkersCopiesTakeEachOnce) {
  int64_t compared = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const BuiltProgram built = build_walked(seed);
    const RankProgram& p = built.program->rank(0);
    for (int worker = 0; worker < p.workers; ++worker) {
      std::map<int64_t, int64_t> counters;
      if (p.dynamic) continue;
      std::vector<Task> alone, together;
      ListWalk whole(p, 0, ListKind::kDispatch, worker);
      while (whole.next(PlainCounters{counters})) alone.push_back(whole.task());
      for (int share = 0; share < 3; ++share) {
        ListWalk walk(p, 0, ListKind::kDispatch, worker, {.share = share, .shares = 3});
        for (std::size_t i = share; walk.next(PlainCounters{counters}); i += 3) {
          ASSERT_LT(i, alone.size());
          ASSERT_EQ(key(walk.task()), key(alone[i]));
          together.push_back(walk.task());
        }
      }
      ASSERT_EQ(sorted(together), sorted(alone)) << built.text;
      compared += static_cast<int64_t>(alone.size());
    }
  }
  EXPECT_GT(compared, 1000);
}

}  // namespace
}  // namespace uniep::test
