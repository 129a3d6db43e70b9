// What the simulator takes a dispatch to be, against what each of its tasks does.
#include "sim/task_costs.h"

#include <gtest/gtest.h>

#include <map>

#include "program/task_work.h"
#include "support/branch_counts.h"
#include "support/built_program.h"

namespace uniep::test {
namespace {

TEST(TaskCosts, AreWhatTasksOfTheDispatchDo) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const BuiltProgram built = build(seed, seed % 2 == 0 ? Direction::kForward : Direction::kBackward);
    const Program& program = *built.program;
    const sim::ProgramCosts costs(program);
    const int64_t row_bytes = 2 * program.request().shape.hidden;
    std::vector<program::Move> moves;
    for (int rank = 0; rank < program.ranks(); ++rank) {
      const RankProgram& p = program.rank(rank);
      const sim::RankCosts& own = costs.ranks.at(static_cast<std::size_t>(rank));
      std::vector<int64_t> fetched(program.ranks());
      for (int launch = 0; launch < p.launches; ++launch) {
        const int64_t dispatched = list_length(p, launch, ListKind::kDispatch);
        for (int64_t i = 0; i < dispatched + list_length(p, launch, ListKind::kRelay); ++i) {
          const bool relayed = i >= dispatched;
          const Task task = relayed ? list_task(p, launch, ListKind::kRelay, i - dispatched)
                                    : list_task(p, launch, ListKind::kDispatch, i);
          branches.count("relayed", relayed);
          if (!task.has_tile()) continue;
          const TaskWork work = task_work(program, p, task, &moves);
          std::map<int32_t, int64_t> rows;
          for (const program::Move& move : moves) {
            ASSERT_EQ(move.bytes % row_bytes, 0) << built.text;
            rows[move.from == rank ? move.to : move.from] += move.bytes / row_bytes;
          }
          if (task.stage == Stage::kPush) {
            branches.count("push", true);
            ASSERT_EQ(own.pushed_rows(task), work.rows_taken) << built.text;
            continue;
          }
          branches.count("pull", task.stage == Stage::kPull);
          branches.count("receive", task.stage == Stage::kReceive);
          branches.count("with deduplication", p.dedup);
          branches.count("x again", p.operands == 2);
          const sim::CopyWork& copy = own.copy(task);
          ASSERT_EQ(copy.rows_out, work.rows_put) << built.text;
          if (task.stage != Stage::kPull) continue;
          ASSERT_EQ(copy.rows_in, work.rows_taken) << built.text;
          std::map<int32_t, int64_t> by_peer;
          for (int32_t at = copy.peers_begin; at < copy.peers_end; ++at) {
            by_peer[own.peers()[at].peer] += own.peers()[at].rows;
            fetched[own.peers()[at].peer] += own.peers()[at].rows;
          }
          ASSERT_EQ(by_peer, rows) << built.text;
        }
      }
      if (p.push) continue;
      for (int64_t& count : fetched) count /= p.operands;
      std::vector<int64_t> said = own.fetched();
      said.resize(fetched.size());
      ASSERT_EQ(said, fetched) << built.text;
    }
  }
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::test
