#pragma once

#include "engine/cuda/device/arguments/layer_config.h"
#include "engine/cuda/device/shared_memory/shared_storage.h"
#include "engine/cuda/device/signals/waiting.h"
#include "engine/cuda/device/transfer/copy_agent.h"
#include "program/wgrad_queues.h"

namespace uniep::cuda {

// A tile that is still to be written, as one math warp sees it.
struct DeferredTile {
  LayerTask task;
  RowSource rows[16];  // the warp's part of the row table
  uint32_t slot;       // of the task ring
  uint32_t next_slot;  // of the tile in the mainloop, where there are biases
};

// The compute list of a launch, and where the scheduler is in it.
struct ComputeList {
  Participants walkers;
  int64_t length;         // 0 for a worker that does not walk it
  ListCursor cursors[2];  // of the cluster's CTAs
  bool all_arrived;       // the peers, as far as the scheduler knows
  bool in_gemm_queues;    // the list begins with them, and they are not at their end
  int64_t begin;          // positions before this one are theirs
  GemmQueues queues;
  GemmQueueWalk walk;
};

// With weight gradients beside the dgrads: where the scheduler is in the three queues.
template <bool kMixed>
struct MixedList {
  WgradQueues queues;
  WgradQueueWalk walk;
  ListCursor cursors[2];  // of the cluster's CTAs
};
template <>
struct MixedList<false> {};

// A CTA's shared memory in the megakernel: the GEMM core's, and what the other roles need.
template <LayerKernelConfig kLayer>
struct LayerStorage : SharedStorage<kLayer.gemm> {
  RankCall call;  // a copy: read often, by all roles
  uint32_t epoch;
  int32_t launch, worker;
  uint64_t leaves_ns;  // of a lent worker, or 0
  ComputeList compute;
  [[no_unique_address]] MixedList<kLayer.mixed> mixed;
  DeferredTile deferred[kMathWarps];
  uint64_t deal;                          // of each task: the loader is about to need the next
  uint64_t stored[kLayerTaskSlots];       // of the task in each slot: the math warps that have stored their part
  WalkState walk;                         // of the copy warp
  uint32_t reduce_items;                  // that the CTA's warps have dealt among themselves
  TileTimes tile_times[kLayerTaskSlots];  // of the task in each slot, for the profiler
  uint64_t tile_wait_begin_ns;            // of the task to come
  RecordState reduce_record;              // of the math warps
};

// The same memory, as dgrad FC2's GEMM sees it.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE auto& first_storage(LayerStorage<kLayer>& shared) {
  using Storage = SharedStorage<first_gemm(kLayer)>;
  static_assert(sizeof(Storage) == sizeof(SharedStorage<kLayer.gemm>), "all GEMMs of a launch share their memory");
  return reinterpret_cast<Storage&>(shared);
}

template <LayerKernelConfig kLayer>
UNIEP_DEVICE RunningCall running_call(const LayerStorage<kLayer>& shared) {
  return {shared.call, shared.epoch, shared.launch, shared.worker, shared.leaves_ns};
}

// Named barriers; 0 is __syncthreads().
constexpr uint32_t kLaunchEndBarrier = 1;  // all warps
constexpr uint32_t kMathBarrier = 2;       // the math warps

// Readers of a record: those of the GEMM core, and the signal warp.
constexpr uint32_t kLayerTaskReaders = kTaskReaders + 1;

}  // namespace uniep::cuda
