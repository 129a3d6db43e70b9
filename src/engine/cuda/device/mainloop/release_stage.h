#pragma once

#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/shared_memory/shared_storage.h"

namespace uniep::cuda {

// Hands a stage back to the loaders that fill it: each math warp tells every CTA of the cluster.
template <GemmConfig kConfig>
UNIEP_DEVICE void release_stage(SharedStorage<kConfig>& shared, uint32_t stage) {
  const uint32_t lane = ptx::lane_index();
  if constexpr (kConfig.cluster == 1) {
    if (lane == 0) ptx::mbarrier_arrive(shared.empty[stage]);
  } else {
    if (lane < static_cast<uint32_t>(kConfig.cluster)) ptx::mbarrier_arrive_remote(shared.empty[stage], lane);
  }
}

// The same for all math warps, by one warp.
template <GemmConfig kConfig>
UNIEP_DEVICE void release_stage_for_all(SharedStorage<kConfig>& shared, uint32_t stage) {
  const uint32_t lane = ptx::lane_index();
  if constexpr (kConfig.cluster == 1) {
    if (lane == 0) ptx::mbarrier_arrive_times(shared.empty[stage], kMathWarps);
  } else {
    if (lane < static_cast<uint32_t>(kConfig.cluster)) {
      ptx::mbarrier_arrive_remote_times(shared.empty[stage], lane, kMathWarps);
    }
  }
}

}  // namespace uniep::cuda
