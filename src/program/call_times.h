#pragma once

#include "program/stage.h"

// What CallTimes (uniep/call_timer.h) are made of: how a rank's tiles become its times, for the host and the device.
namespace uniep::program {

// Times in nanoseconds. In page-locked memory on the cuda engine, where a kernel writes it.
struct alignas(64) RankTimes {
  uint64_t first_waits_ns;  // of all workers, before tiles of the first GEMM
  uint64_t arrival_ns;      // from the end of the last GEMM tile until the last rows that a sum waited for had come
  uint64_t sum_ns;          // from there until the last sum's end
  uint64_t call_ns;         // from when the first tile was waited for until the last one's end
  uint32_t workers;         // that have tiles of the first GEMM
  uint32_t lost;            // 1: not all tiles are known
  uint32_t runs;            // how often this was written of that call: 1, and once more with each replay of a graph
  uint32_t call;            // which one it was: 0 while this is written, the last of all
};

struct TileSpan {
  Stage stage;
  uint64_t wait_begin_ns, begin_ns, end_ns;
};

UNIEP_HOST_DEVICE bool is_gemm(Stage stage) {
  return stage == Stage::kFirstGemm || stage == Stage::kSecondGemm || stage == Stage::kWgradFc2 ||
         stage == Stage::kWgradFc1;
}

// What is to be known of all of a rank's tiles before their times can be added up.
struct CallSpan {
  uint64_t begin_ns = ~uint64_t{0};
  uint64_t gemms_end_ns = 0;  // 0: no GEMM
  uint64_t sums_end_ns = 0;
  uint64_t end_ns = 0;

  UNIEP_HOST_DEVICE void add(const TileSpan& tile) {
    if (tile.wait_begin_ns < begin_ns) begin_ns = tile.wait_begin_ns;
    if (tile.end_ns > end_ns) end_ns = tile.end_ns;
    if (is_gemm(tile.stage) && tile.end_ns > gemms_end_ns) gemms_end_ns = tile.end_ns;
    if (tile.stage == Stage::kReduce && tile.end_ns > sums_end_ns) sums_end_ns = tile.end_ns;
  }

  // Since when nothing hides the sums.
  UNIEP_HOST_DEVICE uint64_t bare_ns() const { return gemms_end_ns > 0 ? gemms_end_ns : begin_ns; }
  UNIEP_HOST_DEVICE uint64_t sum_ns() const { return sums_end_ns > bare_ns() ? sums_end_ns - bare_ns() : 0; }
  UNIEP_HOST_DEVICE uint64_t call_ns() const { return end_ns > begin_ns ? end_ns - begin_ns : 0; }
  // How long behind the last GEMM a sum waited; 0 for one that did not.
  UNIEP_HOST_DEVICE uint64_t arrival_ns(const TileSpan& tile) const {
    constexpr uint64_t kShortestWaitNs = 1000;  // less is asking alone
    if (tile.stage != Stage::kReduce || tile.begin_ns < tile.wait_begin_ns + kShortestWaitNs) return 0;
    return tile.begin_ns > bare_ns() ? tile.begin_ns - bare_ns() : 0;
  }
};

// Of one worker's compute agent.
struct FirstWaits {
  uint64_t first_ns = ~uint64_t{0};           // when it began to wait for its first tile
  uint64_t first_of_first_ns = ~uint64_t{0};  // the same of the first GEMM's
  uint64_t waits_ns = 0;

  UNIEP_HOST_DEVICE void add(const TileSpan& tile) {
    if (tile.wait_begin_ns < first_ns) first_ns = tile.wait_begin_ns;
    if (tile.stage != Stage::kFirstGemm) return;
    if (tile.wait_begin_ns < first_of_first_ns) first_of_first_ns = tile.wait_begin_ns;
    waits_ns += tile.begin_ns - tile.wait_begin_ns;
  }
  UNIEP_HOST_DEVICE bool has_tiles() const { return first_of_first_ns != ~uint64_t{0}; }
  // A dispatch in launches before the GEMM's is waited for, too.
  UNIEP_HOST_DEVICE uint64_t total_ns(const CallSpan& call) const {
    return waits_ns + (has_tiles() && first_of_first_ns == first_ns ? first_ns - call.begin_ns : 0);
  }
};

}  // namespace uniep::program
