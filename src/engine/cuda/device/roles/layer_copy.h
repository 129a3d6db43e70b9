#pragma once

#include "engine/cuda/device/layer_storage.h"
#include "engine/cuda/device/roles/copy_agent.h"
#include "engine/cuda/device/roles/reduce.h"

// The copies of the megakernel. comm.where=warps: each CTA's copy warp walks the lists of copies beside the GEMMs.
// comm.where=sms: the first CTAs dispatch with all their warps before they join the GEMMs, and math warps send once
// their CTA has no more tiles. Either way all warps that are through sum what has come back.
namespace uniep::cuda {

// The send list, when the combine is staged. False once the call has failed.
template <LayerConfig kLayer, SumDepth kDepth, typename Ring>
UNIEP_DEVICE bool send_share(const RunningCall& running, Ring& ring, Share share) {
  if constexpr (kLayer.combine == CombineKind::kGroups) return run_group_send<kDepth>(running, share, SendTeam{});
  if constexpr (kLayer.combine == CombineKind::kStaged) return run_send(running, ring, share);
  return true;
}

template <LayerConfig kLayer>
UNIEP_DEVICE void run_layer_copy(LayerStorage<kLayer>& shared) {
  const RunningCall running = running_call(shared);
  if constexpr (!kLayer.on_sms) {
    CopyRing ring(shared.copy_ring);
    if (!run_dispatch(running, ring, Share{}) || !send_share<kLayer, kShallowSum>(running, ring, Share{})) return;
  }
  run_reduce<kShallowSum>(running, &shared.reduce_items);
}

// Rings for all warps of a CTA in the memory of the pipeline, while that is not in use.
template <LayerConfig kLayer>
struct PipelineRings {
  static constexpr int kWarps = kGemmThreads / 32;
  static constexpr int kChunkBytes = 4096;
  static constexpr int kStages = (kLayer.gemm.stages * stage_bytes(kLayer.gemm) / kWarps - 256) / kChunkBytes;
  CopyRingStorage<kChunkBytes, kStages> ring[kWarps];
};

template <LayerConfig kLayer>
UNIEP_DEVICE auto& pipeline_ring(LayerStorage<kLayer>& shared, uint32_t warp) {
  using Rings = PipelineRings<kLayer>;
  static_assert(sizeof(Rings) <= sizeof(shared.a) + sizeof(shared.b), "the rings lie in the operands' memory");
  return reinterpret_cast<Rings*>(&shared.a)->ring[warp];
}

// All warps of a CTA that dispatches, before its pipeline starts.
template <LayerConfig kLayer>
UNIEP_DEVICE void dispatch_first(LayerStorage<kLayer>& shared, uint32_t warp) {
  const RunningCall running = running_call(shared);
  auto& storage = pipeline_ring(shared, warp);
  if (ptx::lane_index() == 0) {
    init_copy_ring(storage);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  CopyRing ring(storage);
  run_dispatch(running, ring, Share{warp, PipelineRings<kLayer>::kWarps});
  ptx::fence_proxy_async_shared();
  __syncthreads();
}

// A math warp, once its CTA has no more tiles.
template <LayerConfig kLayer>
UNIEP_DEVICE void send_and_reduce(LayerStorage<kLayer>& shared, uint32_t math_warp) {
  const RunningCall running = running_call(shared);
  if constexpr (kLayer.on_sms && kLayer.combine != CombineKind::kEpilogue) {
    ptx::named_barrier(kMathBarrier, kMathWarps * ptx::kThreadsPerWarp);  // nobody multiplies any more
    auto& storage = pipeline_ring(shared, math_warp);
    if (ptx::lane_index() == 0) {
      init_copy_ring(storage);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    CopyRing ring(storage);
    if (!send_share<kLayer, kDeepSum>(running, ring, Share{math_warp, kMathWarps})) return;
  }
  run_reduce<kDeepSum>(running, &shared.reduce_items);
}

}  // namespace uniep::cuda
