#include "program/task_work.h"

#include <gtest/gtest.h>

#include "cli/bytes_moved.h"
#include "support/branch_counts.h"
#include "support/built_program.h"

// What tasks do, added up over a layer, against sizes and routing.
namespace uniep::test {
namespace {

// Rows from a token's rank to the ranks of its experts, counted by tokens; slots that share a key travel as one row.
template <typename KeyOfExpert>
ByteMatrix rows_by_tokens(const internal::PlacementState& state, KeyOfExpert key_of_expert) {
  ByteMatrix rows(state.ranks, std::vector<int64_t>(state.ranks));
  for (int rank = 0; rank < state.ranks; ++rank) {
    const internal::RankPlacement& own = state.rank[rank];
    for (int64_t token = 0; token < own.tokens; ++token) {
      const int32_t* const experts = own.expert_of_slot.data() + token * state.shape.topk;
      for (int64_t slot = 0; slot < state.shape.topk; ++slot) {
        if (experts[slot] < 0) continue;
        bool counted = false;
        for (int64_t earlier = 0; earlier < slot && !counted; ++earlier) {
          counted = experts[earlier] >= 0 && key_of_expert(experts[earlier]) == key_of_expert(experts[slot]);
        }
        if (!counted) ++rows[rank][state.rank_of_expert[experts[slot]]];
      }
    }
  }
  return rows;
}

ByteMatrix transposed(const ByteMatrix& matrix) {
  ByteMatrix result = matrix;
  for (std::size_t row = 0; row < matrix.size(); ++row) {
    for (std::size_t column = 0; column < matrix.size(); ++column) result[column][row] = matrix[row][column];
  }
  return result;
}

ByteMatrix times(ByteMatrix matrix, int64_t factor) {
  for (std::vector<int64_t>& row : matrix) {
    for (int64_t& entry : row) entry *= factor;
  }
  return matrix;
}

ByteMatrix sum(ByteMatrix a, const ByteMatrix& b) {
  for (std::size_t row = 0; row < a.size(); ++row) {
    for (std::size_t column = 0; column < a.size(); ++column) a[row][column] += b[row][column];
  }
  return a;
}

int64_t total(const ByteMatrix& matrix) {
  int64_t all = 0;
  for (const std::vector<int64_t>& row : matrix) {
    for (const int64_t entry : row) all += entry;
  }
  return all;
}

struct RowsByTokens {
  ByteMatrix dispatch, combine, slots;  // slots: from tokens' ranks to experts'
};

RowsByTokens rows_by_tokens(const Program& program) {
  const internal::PlacementState& state = program.placement();
  const auto by_expert = [](int32_t expert) { return static_cast<int64_t>(expert); };
  const auto by_rank = [&](int32_t expert) { return static_cast<int64_t>(state.rank_of_expert[expert]); };
  const int64_t groups = program.request().numerics.combine_groups;
  const auto by_group = [&](int32_t expert) { return expert * groups / state.shape.experts; };
  const ByteMatrix slots = rows_by_tokens(state, by_expert);
  return {program.request().schedule.dispatch.dedup ? rows_by_tokens(state, by_rank) : slots,
          transposed(groups > 0 ? rows_by_tokens(state, by_group) : slots), slots};
}

// All tasks of a Program, added up by stage.
struct Totals {
  ByteMatrix dispatch, combine;
  TaskWork of_stage[kStageCount];
  int64_t operations[kStageCount] = {};
};

Totals totals(const Program& program) {
  const ByteMatrix none(program.ranks(), std::vector<int64_t>(program.ranks()));
  Totals all{none, none, {}, {}};
  std::vector<Move> moves;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const RankProgram& p = program.rank(rank);
    for (int launch = 0; launch < p.launches; ++launch) {
      for (int kind = 0; kind < kListKinds; ++kind) {
        const ListKind list = static_cast<ListKind>(kind);
        for (int64_t i = 0; i < list_length(p, launch, list); ++i) {
          const Task task = list_task(p, launch, list, i);
          const TaskWork work = task_work(program, p, task, &moves);
          EXPECT_EQ(task_work(program, p, task), work);
          const int stage = static_cast<int>(task.stage);
          all.operations[stage] += work.gemm.operations();
          all.of_stage[stage].read_bytes += work.read_bytes;
          all.of_stage[stage].written_bytes += work.written_bytes;
          all.of_stage[stage].rows_taken += work.rows_taken;
          all.of_stage[stage].rows_put += work.rows_put;
          ByteMatrix& bytes = list == ListKind::kDispatch || list == ListKind::kRelay ? all.dispatch : all.combine;
          for (const Move& move : moves) bytes[move.from][move.to] += move.bytes;
        }
      }
    }
  }
  return all;
}

BuiltProgram build_any(uint64_t seed) {
  return build(seed, seed % 2 == 0 ? Direction::kForward : Direction::kBackward);
}

TEST(TaskWork, MovesAreTheRowsThatTokensNeed) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const BuiltProgram built = build_any(seed);
    const Program& program = *built.program;
    const RankProgram& p = program.rank(0);
    const RowsByTokens rows = rows_by_tokens(program);
    const Totals all = totals(program);
    const int64_t row_bytes = program.placement().shape.hidden * 2;
    const bool backward = p.direction == Direction::kBackward;
    ASSERT_EQ(all.dispatch, times(rows.dispatch, row_bytes * p.operands)) << built.text;
    const ByteMatrix dprobs = times(transposed(rows.slots), backward ? 4 : 0);
    ASSERT_EQ(all.combine, sum(times(rows.combine, row_bytes), dprobs)) << built.text;
    branches.count("pull", !p.push);
    branches.count("push", p.push);
    branches.count("deduplication", p.dedup);
    branches.count("none", !p.dedup);
    branches.count("from the epilogue", p.epilogue_combine);
    branches.count("staged", !p.epilogue_combine && p.combine_groups == 0);
    branches.count("groups", p.combine_groups > 0);
    branches.count("x again", p.operands == 2);
    branches.count("column chunks", p.chunks > 1);
    branches.count("backward", backward);
  }
  branches.expect_all_taken();
}

TEST(TaskWork, GemmsAndBytesAddUpToTheLayers) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const BuiltProgram built = build_any(seed);
    const Program& program = *built.program;
    const RankProgram& p = program.rank(0);
    const internal::PlacementState& state = program.placement();
    const Totals all = totals(program);
    const auto of = [&](Stage stage) { return all.of_stage[static_cast<int>(stage)]; };
    const auto operations = [&](Stage stage) { return all.operations[static_cast<int>(stage)]; };
    int64_t rows = 0, padded = 0, tokens = 0, used = 0;
    for (int rank = 0; rank < state.ranks; ++rank) {
      rows += state.rows[rank];
      padded += state.padded_rows[rank];
      tokens += state.rank[rank].tokens;
    }
    const int64_t hidden = state.shape.hidden, intermediate = state.shape.intermediate;
    const bool forward = p.direction == Direction::kForward;
    const RowsByTokens by_tokens = rows_by_tokens(program);
    used = total(by_tokens.slots);
    ASSERT_EQ(operations(Stage::kFirstGemm), (forward ? 4 : 2) * rows * hidden * intermediate) << built.text;
    ASSERT_EQ(operations(Stage::kSecondGemm), (forward ? 2 : 4) * rows * hidden * intermediate) << built.text;
    ASSERT_EQ(operations(Stage::kWgradFc2), forward ? 0 : 2 * rows * hidden * intermediate) << built.text;
    ASSERT_EQ(operations(Stage::kWgradFc1), forward ? 0 : 4 * rows * hidden * intermediate) << built.text;
    // Each row of each expert, and its padding, is written once.
    const int64_t landed =
        of(Stage::kPull).written_bytes + of(Stage::kReceive).written_bytes + of(Stage::kPush).written_bytes;
    int64_t pushed_elsewhere = 0;
    for (int from = 0; p.push && from < state.ranks; ++from) {
      for (int to = 0; to < state.ranks; ++to) pushed_elsewhere += from == to ? 0 : all.dispatch[from][to];
    }
    ASSERT_EQ(landed + pushed_elsewhere, padded * hidden * 2 * p.operands) << built.text;
    const int64_t z_and_a = rows * 3 * intermediate * 2;
    ASSERT_TRUE(!forward || of(Stage::kFirstGemm).written_bytes == z_and_a) << built.text;
    // Sums: a row for each summand, and y.
    const TaskWork sums = of(Stage::kReduce);
    ASSERT_EQ(sums.read_bytes, total(by_tokens.combine) * hidden * 2 + (forward ? 0 : used * 4)) << built.text;
    ASSERT_EQ(sums.written_bytes, tokens * hidden * 2 + (forward ? 0 : tokens * state.shape.topk * 4)) << built.text;
    ASSERT_EQ(sums.rows_put, tokens * p.chunks) << built.text;
  }
}

TEST(TaskWork, BytesMovedIsWhatTokensSend) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const BuiltProgram built = build_any(seed);
    const Program& program = *built.program;
    const RowsByTokens rows = rows_by_tokens(program);
    const int64_t row_bytes = program.placement().shape.hidden * 2;
    const cli::BytesMoved moved =
        cli::bytes_moved(Placement(built.placement), program.request().schedule, program.request().numerics);
    ASSERT_EQ(moved.dispatch, times(rows.dispatch, row_bytes)) << built.text;
    ASSERT_EQ(moved.combine, times(rows.combine, row_bytes)) << built.text;
  }
}

}  // namespace
}  // namespace uniep::test
