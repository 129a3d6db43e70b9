#pragma once

#include "engine/cuda/device/ptx/common.h"

namespace uniep::cuda {

// All threads of the CTA: the sum of `value` over the threads before this one, and over all of them.
template <int kWarps>
UNIEP_DEVICE int32_t exclusive_sum(int32_t value, int32_t (&warp_sums)[kWarps], int32_t& total) {
  const uint32_t lane = ptx::lane_index();
  const uint32_t warp = threadIdx.x / 32;
  int32_t inclusive = value;
  for (uint32_t distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int32_t before = 0;
  total = 0;
  for (uint32_t other = 0; other < kWarps; ++other) {
    if (other < warp) before += warp_sums[other];
    total += warp_sums[other];
  }
  __syncthreads();
  return before + inclusive - value;
}

}  // namespace uniep::cuda
