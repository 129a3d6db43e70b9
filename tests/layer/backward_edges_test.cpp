#include <gtest/gtest.h>

#include <map>

#include "program/checker.h"
#include "support/branch_counts.h"
#include "support/built_program.h"

// What backward alone has of edges and order: counters by expert, dprobs on their way back, weight gradients.
namespace uniep::test {
namespace {

// A signal that one task of a space leaves out, and the waits for that space.
TEST(Checker, NoticesADroppedExpertCounter) {
  for (const CounterSpace space : {CounterSpace::kExpertFirstTiles, CounterSpace::kExpertRows}) {
    expect_noticed(Direction::kBackward, "save.xg=redispatch,save.z=keep", [space](bool& touched) {
      CheckTampering tampering;
      tampering.signal = [&touched, space](int, const Task&, CounterSignal& signal) {
        const bool drop = signal.space == space && !touched;
        touched |= drop;
        return !drop;
      };
      return tampering;
    });
    expect_noticed(Direction::kBackward, "save.xg=redispatch,save.z=keep", [space](bool& touched) {
      CheckTampering tampering;
      tampering.wait = [&touched, space](int, const Task&, CounterWait& wait) {
        touched |= wait.space == space;
        return wait.space != space;
      };
      return tampering;
    });
  }
}

// Each signal costs time on a GPU: forward has none by expert, and rows of x again are counted once.
TEST(Edges, ExpertCountersAreForBackwardOnly) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const Direction direction = seed % 2 == 0 ? Direction::kForward : Direction::kBackward;
    const BuiltProgram built = build(seed, direction);
    for (int rank = 0; rank < built.layer.ranks; ++rank) {
      const RankProgram& p = built.program->rank(rank);
      std::map<CounterSpace, int64_t> amounts;
      for (int launch = 0; launch < p.launches; ++launch) {
        for (int kind = 0; kind < kListKinds; ++kind) {
          const ListKind list = static_cast<ListKind>(kind);
          for (int64_t i = 0; i < list_length(p, launch, list); ++i) {
            for_each_counter_signal(p, list_task(p, launch, list, i),
                                    [&](const CounterSignal& signal) { amounts[signal.space] += signal.amount; });
          }
        }
      }
      const bool backward = direction == Direction::kBackward;
      const int64_t rows = built.placement->padded_rows[rank];
      EXPECT_EQ(amounts[CounterSpace::kFullRows], rows) << built.text;
      EXPECT_EQ(amounts[CounterSpace::kExpertRows], p.operands == 2 ? rows : 0) << built.text;
      EXPECT_EQ(amounts[CounterSpace::kExpertFirstTiles], backward ? amounts[CounterSpace::kFirstTiles] : 0)
          << built.text;
      branches.count("forward with rows", !backward && rows > 0);
      branches.count("x again, deduplicated", p.operands == 2 && p.dedup && rows > 0);
      branches.count("x again, one by one", p.operands == 2 && !p.dedup && rows > 0);
      branches.count("backward without x again", backward && p.operands == 1 && rows > 0);
      branches.count("several experts", p.local_experts > 1);
    }
  }
  branches.expect_all_taken();
}

// Who returns a row's dprob must have done so when the flag of column chunk 0 is seen. Here a task of the last chunk
// does, or nobody.
TEST(Checker, NoticesADprobStoredBehindItsFlag) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built = build(seed, Direction::kBackward, {.ranks = {1, 2}, .most_local_experts = 6},
                                     PartialSchedule::parse("combine.column_chunks=2"));
    const Program& program = *built.program;
    const RankProgram& first = program.rank(0);
    const auto has_rows = [&](int rank) { return local_blocks(program.rank(rank)) > 0; };
    if (first.chunks < 2 || !(has_rows(0) || has_rows(program.ranks() - 1))) continue;
    CheckTampering late;
    late.returns_probs = [&](int rank, const Task& task) {
      Task in_first = task;
      const bool gemm = task.stage == Stage::kSecondGemm;
      if (task.n != (gemm ? program.rank(rank).chunk_tile[1] : 1)) return false;
      in_first.n = 0;
      return returns_prob_gradients(program.rank(rank), in_first);
    };
    CheckTampering never;
    never.returns_probs = [](int, const Task&) { return false; };
    EXPECT_TRUE(check_program(program).ok) << built.text;
    EXPECT_FALSE(check_program(program, late).ok) << built.text;
    EXPECT_FALSE(check_program(program, never).ok) << built.text;
    branches.count("by the epilogue", first.epilogue_combine);
    branches.count("by sends", !first.epilogue_combine && first.combine_groups == 0);
    branches.count("by sends of groups", first.combine_groups > 0);
  }
  branches.expect_all_taken();
}

// x again lands last: without fusion=layer all tiles that do not read it come before those that do.
TEST(Order, WeightGradientsThatReadXAgainComeLast) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    const BuiltProgram built = build(seed, Direction::kBackward, {.most_local_experts = 8});
    const RankProgram& p = built.program->rank(0);
    const bool layer = built.program->request().schedule.fusion == Fusion::kLayer;
    for (int launch = 0; launch < p.launches; ++launch) {
      if (!p.stages[launch].wgrad_fc2 || !p.stages[launch].wgrad_fc1) continue;
      int turns = 0;  // from one of the two to the other
      Stage last = Stage::kWgradFc2;
      for (int64_t i = 0; i < list_length(p, launch, ListKind::kCompute); ++i) {
        const Stage stage = list_task(p, launch, ListKind::kCompute, i).stage;
        if (stage != Stage::kWgradFc2 && stage != Stage::kWgradFc1) continue;
        turns += stage != last;
        last = stage;
      }
      const bool in_order = p.operands == 2 && !layer;
      EXPECT_EQ(turns, in_order ? 1 : 2 * p.waves - 1) << built.text;
      const bool fill = p.stages[launch].second_gemm, waves = p.waves > 1;
      branches.count("x again, several waves, pairs, fill", in_order && waves && fill);
      branches.count("x again, several waves, pairs, after", in_order && waves && !fill);
      branches.count("x again, several waves, layer", layer && p.operands == 2 && waves);
      branches.count("x kept, several waves, pairs", !layer && p.operands == 1 && waves);
    }
  }
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::test
