#pragma once

#include "engine/cuda/device/layer_storage.h"
#include "engine/cuda/device/roles/epilogue.h"

namespace uniep::cuda {

// Where the weight gradients of the launch go.
template <LayerKernelConfig kLayer>
class FilledOutput {
 public:
  static constexpr int64_t kElementBytes = kLayer.filled == FilledGradients::kBFloat16 ? 2 : 4;

  UNIEP_DEVICE explicit FilledOutput(const LayerStorage<kLayer>& shared) : shared_(shared) {}

  UNIEP_DEVICE void* matrix(const WarpTile& tile) const {
    const GradientMatrices& gradients = shared_.call.gradients[tile.product];
    if (gradients.addresses != nullptr) return gradients.addresses[tile.expert];
    const WgradGrid& grid = grid_of(tile);
    return static_cast<uint8_t*>(gradients.base) +
           static_cast<int64_t>(tile.expert) * grid.rows * grid.columns * kElementBytes;
  }
  UNIEP_DEVICE int64_t leading(const WarpTile& tile) const { return grid_of(tile).columns; }
  UNIEP_DEVICE int32_t columns(const WarpTile& tile) const { return grid_of(tile).columns; }

  // The map that an expert's matrix is in, and which one of the map's it is.
  UNIEP_DEVICE const TensorMap& map(const WarpTile& tile) const {
    const GradientMatrices& gradients = shared_.call.gradients[tile.product];
    return gradients.maps[gradients.addresses != nullptr ? tile.expert : 0];
  }
  UNIEP_DEVICE int32_t matrix_in_map(const WarpTile& tile) const {
    return shared_.call.gradients[tile.product].addresses != nullptr ? 0 : tile.expert;
  }

 private:
  UNIEP_DEVICE const WgradGrid& grid_of(const WarpTile& tile) const {
    return tile.product != 0 ? shared_.call.program.wgrad_fc1 : shared_.call.program.wgrad_fc2;
  }

  const LayerStorage<kLayer>& shared_;
};

}  // namespace uniep::cuda
