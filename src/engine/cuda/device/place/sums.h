#pragma once

#include "engine/cuda/device/place/cta.h"

// Sums of counts by kind: slots by expert, tokens by class. One thread a kind.
namespace uniep::cuda {

// Turns the warps' counts, [warps][kinds], into what comes before each warp. Returns the CTA's count.
UNIEP_DEVICE int32_t sum_over_warps(int32_t* counts, int32_t kinds, int32_t kind) {
  int32_t before = 0;
  for (int32_t warp = 0; warp < kPlaceWarps; ++warp) {
    int32_t& of_warp = counts[warp * kinds + kind];
    const int32_t count = of_warp;
    of_warp = before;
    before += count;
  }
  return before;
}

struct CtaSums {
  int32_t before;  // the CTA's
  int32_t all;
};

// `count_of(cta)` is what a CTA of the rank has counted.
template <typename CountOf>
UNIEP_DEVICE CtaSums sum_over_ctas(const PlaceCta& cta, CountOf&& count_of) {
  CtaSums sums{0, 0};
#pragma unroll 8
  for (int32_t other = 0; other < cta.args.ctas; ++other) {
    const int32_t count = count_of(other);
    sums.before += other < cta.index ? count : 0;
    sums.all += count;
  }
  return sums;
}

}  // namespace uniep::cuda
