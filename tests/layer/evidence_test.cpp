#include "verify/evidence.h"

#include <gtest/gtest.h>

// Whom three runs that disagree speak against: of sums of which everything is known.
namespace uniep::verify {
namespace {

constexpr int kRanks = 4, kTopk = 2;

// A token on each of four ranks, whose two slots go to the experts of ranks 1 and 2; an expert a rank. Run 1 computes
// each expert one rank further on, run 2 two ranks.
struct ThreeRuns {
  Inputs inputs;
  std::vector<HostRouting> routings;
  std::vector<Sums> runs;

  ThreeRuns() {
    inputs.config.shape = {.hidden = 64, .intermediate = 64, .experts = kRanks, .topk = kTopk};
    inputs.routings.resize(kRanks);
    routings.assign(kRanks, {{1, 2}, {0.5f, 0.5f}});
    for (int run = 0; run < 3; ++run) {
      Sums& sums = runs.emplace_back();
      for (int expert = 0; expert < kRanks; ++expert) sums.host.push_back((expert + run) % kRanks);
      for (const Tensor tensor : {Tensor::kRows, Tensor::kY}) {
        const std::size_t rows = tensor == Tensor::kRows ? kTopk : 1;
        for (int rank = 0; rank < kRanks; ++rank) sums.of(tensor).push_back({std::vector<uint64_t>(rows, 7), 1, 0});
      }
    }
  }

  void set_row(int run, int rank, int slot, uint64_t sum) {
    runs[static_cast<std::size_t>(run)].of(Tensor::kRows)[static_cast<std::size_t>(rank)].sums[slot] = sum;
  }
  void set_y(int run, int rank, uint64_t sum) {
    runs[static_cast<std::size_t>(run)].of(Tensor::kY)[static_cast<std::size_t>(rank)].sums[0] = sum;
  }
  // The experts stay at home, as those that are not in turn do.
  void move_none() {
    for (Sums& sums : runs) sums.host = {0, 1, 2, 3};
  }
  Disagreement compared() const { return compare(inputs, routings, runs); }
};

TEST(Evidence, RunsThatAgreeSpeakAgainstNobody) {
  const Disagreement found = ThreeRuns().compared();
  EXPECT_EQ(found.tiles, 0);
  EXPECT_TRUE(found.evidence.empty());
}

TEST(Evidence, AWrongRowIsTheRanksThatComputedIt) {
  for (int run = 0; run < 3; ++run) {
    ThreeRuns given;
    given.set_row(run, 3, 1, 9);
    given.set_y(run, 3, 9);
    const Disagreement found = given.compared();
    EXPECT_EQ(found.tiles, 2);
    EXPECT_EQ(common_candidates(found.evidence), (std::vector<int>{(2 + run) % kRanks})) << "run " << run;
  }
}

TEST(Evidence, AWrongSumIsTheRanksThatAdded) {
  ThreeRuns given;
  given.set_y(1, 3, 9);
  EXPECT_EQ(common_candidates(given.compared().evidence), std::vector<int>{3});
}

// One of the two wrong rows may be rounded away in its sum: the rank that added is not to be named for it.
TEST(Evidence, ARowWithoutAMajorityMayExplainItsSum) {
  ThreeRuns given;
  given.move_none();
  given.set_row(0, 3, 1, 8);
  given.set_row(1, 3, 1, 9);
  given.set_y(0, 3, 9);
  const Disagreement found = given.compared();
  EXPECT_EQ(found.no_majority.size(), 1u);
  EXPECT_EQ(common_candidates(found.evidence), (std::vector<int>{2, 3}));
}

TEST(Evidence, ARowThatIsWrongInItsRunExplainsItsSumBesideOneWithoutAMajority) {
  ThreeRuns given;
  given.move_none();
  given.set_row(0, 3, 0, 8);  // of rank 1
  given.set_row(0, 3, 1, 8);
  given.set_row(1, 3, 1, 9);
  given.set_y(0, 3, 9);
  EXPECT_EQ(common_candidates(given.compared().evidence), std::vector<int>{1});
}

TEST(Evidence, AWrongDprobIsItsExpertsOrItsTokensRanks) {
  ThreeRuns given;
  for (Sums& sums : given.runs) sums.of(Tensor::kDprobs).assign(kRanks, {std::vector<uint64_t>(kTopk, 7), 1, 0});
  given.runs[0].of(Tensor::kDprobs)[3].sums[1] = 9;
  EXPECT_EQ(common_candidates(given.compared().evidence), (std::vector<int>{2, 3}));
  given.runs[0].of(Tensor::kDprobs)[0].sums[1] = 9;  // the same expert's, of another rank's token
  EXPECT_EQ(common_candidates(given.compared().evidence), std::vector<int>{2});
}

TEST(Evidence, ADprobOfAnUnusedSlotIsItsTokensRanks) {
  ThreeRuns given;
  given.routings[3].ids[1] = -1;
  for (Sums& sums : given.runs) sums.of(Tensor::kDprobs).assign(kRanks, {std::vector<uint64_t>(kTopk, 7), 1, 0});
  given.runs[0].of(Tensor::kDprobs)[3].sums[1] = 9;
  EXPECT_EQ(common_candidates(given.compared().evidence), std::vector<int>{3});
}

TEST(Evidence, SumsBlameAllTheirRowsWhereRowsAreNotKnown) {
  ThreeRuns given;
  for (Sums& sums : given.runs) sums.of(Tensor::kRows).clear();
  given.set_y(0, 3, 9);
  EXPECT_EQ(common_candidates(given.compared().evidence), (std::vector<int>{1, 2, 3}));
}

}  // namespace
}  // namespace uniep::verify
