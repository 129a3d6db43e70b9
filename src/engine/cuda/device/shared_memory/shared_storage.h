#pragma once

#include "engine/cuda/device/arguments/gemm_config.h"
#include "engine/cuda/device/shared_memory/layer_task.h"
#include "engine/cuda/device/shared_memory/task.h"
#include "engine/cuda/device/transfer/copy_ring.h"

namespace uniep::cuda {

template <bool kIsLayer>
struct TaskRingOf {
  using Type = TaskRing<Task, kTaskSlots>;
};
template <>
struct TaskRingOf<true> {
  using Type = TaskRing<LayerTask, kLayerTaskSlots>;
};

// What the GEMM leaves over of the memory that all GEMMs of its kernel have.
template <int kBytes>
struct SpareBytes {
  uint8_t bytes[kBytes];
};
template <>
struct SpareBytes<0> {};

template <GemmConfig kConfig>
struct alignas(1024) SharedStorage {
  using Tasks = typename TaskRingOf<kConfig.in_layer>::Type;
  static constexpr int kOperandABytes = kTileM * kTileK * 2;
  static constexpr int kOperandBBytes = kConfig.tile_n * kTileK * 2;

  alignas(1024) uint8_t a[kConfig.pipeline_stages][kOperandABytes];
  alignas(1024) uint8_t b[kConfig.pipeline_stages][kOperandBBytes];
  alignas(1024) uint8_t staging[kMathWarps][staging_bytes(kConfig)];
  [[no_unique_address]] SpareBytes<spare_bytes(kConfig)> spare;
  alignas(128) CopyRingStorage<kConfig.ring_stage_bytes, kConfig.copy_stages> copy_ring;
  uint64_t full[kConfig.pipeline_stages];
  uint64_t empty[kConfig.pipeline_stages];
  // The math warps have put their part into a lent stage. One a stage: it is lent again only once what was put into it
  // is stored, so none is ever two phases ahead of the warp that stores.
  uint64_t put[kConfig.pipeline_stages];
  Tasks tasks;
};

// A stage index and the parity of its current use; every role walks the stages in the same order.
template <int kStages>
struct StageCursor {
  uint32_t stage = 0;
  uint32_t phase = 0;

  UNIEP_DEVICE void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};

}  // namespace uniep::cuda
