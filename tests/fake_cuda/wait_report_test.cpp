#include <gtest/gtest.h>

#include "engine/cuda/memory/signals.h"
#include "program/edges.h"

// Whom a wait that ran out blames.
namespace uniep::test {
namespace {

cuda::WaitReport report_of(const RankProgram& p, FlagSpace space, int64_t index) {
  cuda::WaitReport report{};
  report.failed = 1;
  report.rank = 0;
  report.stage = static_cast<int32_t>(Stage::kReduce);
  report.awaited = {cuda::SignalKind::kFlag, static_cast<int32_t>(space), index, 3, 2};
  report.ranks = p.ranks;
  report.blocks = p.most_blocks;
  report.units = combine_units(p);
  return report;
}

TEST(WaitReport, NamesTheRankOfAFlag) {
  for (const int32_t groups : {0, 8}) {
    RankProgram p{};
    p.ranks = 4;
    p.most_blocks = 7;
    p.most_token_blocks = 5;
    p.combine_groups = groups;
    for (int32_t peer = 0; peer < p.ranks; ++peer) {
      const std::string of_peer = "] of rank " + std::to_string(peer) + ": expected 3, seen 2";
      for (int32_t unit = 0; unit < combine_units(p); ++unit) {
        const int64_t index = combined_flag(p, peer, unit, unit % kMaxColumnChunks);
        const std::string text = describe(report_of(p, FlagSpace::kCombined, index));
        EXPECT_NE(text.find("flag combined[" + std::to_string(index) + of_peer), std::string::npos) << text;
      }
      for (int32_t block = 0; block < p.most_blocks; ++block) {
        const int64_t index = pushed_flag(p, block % kMaxOperands, peer, block);
        const std::string text = describe(report_of(p, FlagSpace::kPushed, index));
        EXPECT_NE(text.find("flag pushed[" + std::to_string(index) + of_peer), std::string::npos) << text;
      }
      EXPECT_NE(
          describe(report_of(p, FlagSpace::kArrive, peer)).find("for rank " + std::to_string(peer) + " to arrive"),
          std::string::npos);
    }
  }
}

}  // namespace
}  // namespace uniep::test
