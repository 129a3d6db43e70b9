#pragma once

#include "engine/cuda/device/shared_memory/layer_storage.h"
#include "engine/cuda/device/transfer/copy_agent.h"
#include "engine/cuda/device/transfer/reduce.h"

// The copies of the megakernel. comm.where=warps: each CTA's copy warp walks the lists of copies beside the GEMMs.
// comm.where=sms: the first CTAs dispatch or relay with all their warps before they join the GEMMs, and math warps send
// once their CTA has no more tiles. Either way all warps that are through sum what has come back.
namespace uniep::cuda {

// The send list, when the combine is staged. False once the call has failed.
template <LayerKernelConfig kLayer, typename Ring, typename Sum>
UNIEP_DEVICE bool send_share(const RunningCall& running, Ring& ring, WalkState& walk, Share share, Sum& sum) {
  if constexpr (kLayer.combine == CombineKind::kGroups) return run_group_send(running, walk, share, SendTeam{}, sum);
  if constexpr (kLayer.combine == CombineKind::kStaged) return run_send(running, ring, walk, share);
  return true;
}

template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_layer_copy(LayerStorage<kLayer>& shared) {
  const RunningCall running = running_call(shared);
  CopyRing ring(shared.copy_ring);
  RingSum<decltype(ring), 1> sum(ring);
  if constexpr (!kLayer.on_sms) {
    if (!run_dispatch(running, ring, shared.walk, Share{})) return;
    if (!send_share<kLayer>(running, ring, shared.walk, Share{}, sum)) return;
  }
  run_reduce(running, &shared.reduce_items, sum, copy_recorder(running, shared.walk));
}

// What all warps of a CTA copy with in the memory of the pipeline, while that is not in use.
template <LayerKernelConfig kLayer>
struct PipelineCopies {
  static constexpr int kWarps = kGemmThreads / 32;
  static constexpr int kChunkBytes = 4096;
  static constexpr int kStages = (kLayer.gemm.pipeline_stages * stage_bytes(kLayer.gemm) / kWarps - 512) / kChunkBytes;
  CopyStorage<kChunkBytes, kStages> warp[kWarps];
};

template <LayerKernelConfig kLayer>
UNIEP_DEVICE auto& pipeline_copies(LayerStorage<kLayer>& shared, uint32_t warp) {
  using Copies = PipelineCopies<kLayer>;
  static_assert(sizeof(Copies) <= sizeof(shared.a) + sizeof(shared.b), "the copies lie in the operands' memory");
  auto& storage = reinterpret_cast<Copies*>(&shared.a)->warp[warp];
  if (ptx::lane_index() == 0) {
    init_copy_ring(storage.ring);
    storage.walk.record.thread = warp == 0 ? threadIdx.x : kNobody;
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  return storage;
}

// All warps of a CTA that dispatches or relays, before its pipeline starts. Neither this nor send_and_reduce() is
// inlined: the compiler would spill registers of the math warps' loop for them.
template <LayerKernelConfig kLayer>
__device__ __noinline__ void dispatch_first(LayerStorage<kLayer>& shared, uint32_t warp) {
  const RunningCall running = running_call(shared);
  auto& storage = pipeline_copies(shared, warp);
  CopyRing ring(storage.ring);
  const bool relays = running.worker >= running.call.program.dispatch_workers;
  run_dispatch(running, ring, storage.walk, Share{warp, PipelineCopies<kLayer>::kWarps},
               relays ? ListKind::kRelay : ListKind::kDispatch);
  __syncwarp();
  if (ptx::lane_index() == 0) invalidate_copy_ring(storage.ring);
  ptx::fence_proxy_async_shared();
  __syncthreads();
}

// A math warp, once its CTA has no more tiles.
template <LayerKernelConfig kLayer>
__device__ __noinline__ void send_and_reduce(LayerStorage<kLayer>& shared, uint32_t math_warp) {
  const RunningCall running = running_call(shared);
  RegisterSum<2, 8> sum;
  if constexpr (kLayer.on_sms && kLayer.combine != CombineKind::kEpilogue) {
    ptx::named_barrier(kMathBarrier, kMathWarps * ptx::kThreadsPerWarp);  // nobody multiplies any more
    auto& storage = pipeline_copies(shared, math_warp);
    CopyRing ring(storage.ring);
    if (!send_share<kLayer>(running, ring, storage.walk, Share{math_warp, kMathWarps}, sum)) return;
  }
  run_reduce(running, &shared.reduce_items, sum, TileRecorder(running, shared.reduce_record, AgentRole::kCompute));
}

}  // namespace uniep::cuda
