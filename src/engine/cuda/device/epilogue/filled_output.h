#pragma once

#include "engine/cuda/device/epilogue/epilogue.h"
#include "engine/cuda/device/shared_memory/layer_storage.h"

namespace uniep::cuda {

// Where the weight gradients of the launch go.
template <LayerKernelConfig kLayer>
class FilledOutput {
 public:
  UNIEP_DEVICE explicit FilledOutput(const LayerStorage<kLayer>& shared) : shared_(shared) {}

  UNIEP_DEVICE void* matrix(const WarpTile& tile) const {
    const GradientMatrices& gradients = gradients_of(tile);
    if (gradients.addresses != nullptr) return gradients.addresses[tile.expert];
    return static_cast<uint8_t*>(gradients.base) + tile.expert * gradients.expert_stride;
  }
  UNIEP_DEVICE int64_t leading(const WarpTile& tile) const { return grid_of(tile).columns; }
  UNIEP_DEVICE int32_t columns(const WarpTile& tile) const { return grid_of(tile).columns; }
  // The map that an expert's matrix is in, which one of the map's it is, and the tile's first row there.
  UNIEP_DEVICE const TensorMap& map(const WarpTile& tile) const {
    const GradientMatrices& gradients = gradients_of(tile);
    return gradients.maps[gradients.addresses != nullptr ? tile.expert : 0];
  }
  UNIEP_DEVICE int32_t matrix_in_map(const WarpTile& tile) const {
    return gradients_of(tile).addresses != nullptr ? 0 : tile.expert;
  }
  UNIEP_DEVICE int32_t row_in_map(const WarpTile& tile) const {
    return tile.row - (is_up(tile) ? shared_.call.gate_rows : 0);
  }

  // Of the map's boxes: a tile, or where gate and up lie apart 16, so that none holds both.
  UNIEP_DEVICE int32_t box_rows(const WarpTile& tile) const { return gradients_of(tile).box_rows; }

 private:
  // A warp's 16 rows are all of the gate or all of the up: the host sees to it.
  UNIEP_DEVICE bool is_up(const WarpTile& tile) const { return tile.gemm != 0 && tile.row >= shared_.call.gate_rows; }
  UNIEP_DEVICE const GradientMatrices& gradients_of(const WarpTile& tile) const {
    return shared_.call.gradients[tile.gemm + (is_up(tile) ? 1 : 0)];
  }
  UNIEP_DEVICE const WgradGrid& grid_of(const WarpTile& tile) const {
    return tile.gemm != 0 ? shared_.call.program.wgrad_fc1 : shared_.call.program.wgrad_fc2;
  }

  const LayerStorage<kLayer>& shared_;
};

// The CTA's tile of a record.
UNIEP_DEVICE WarpTile filled_tile(const LayerTask& task) {
  return {
      .row = task.row, .column = task.column(), .expert = task.expert, .gemm = task.has(LayerTask::kSecond) ? 1 : 0};
}

// The same memory, as the weight gradients' GEMMs see it.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE auto& filled_storage(LayerStorage<kLayer>& shared) {
  using Storage = SharedStorage<filled_gemm(kLayer)>;
  static_assert(sizeof(Storage) == sizeof(SharedStorage<kLayer.gemm>), "all GEMMs of a launch share their memory");
  return reinterpret_cast<Storage&>(shared);
}

}  // namespace uniep::cuda
