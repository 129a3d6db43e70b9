#pragma once

#include "engine/cuda/device/epilogue/epilogue_swiglu_gradient.h"
#include "engine/cuda/device/shared_memory/layer_storage.h"

namespace uniep::cuda {

// dSwiGLU in the megakernel, as one math warp sees it: what it reads and writes, and which tiles are complete.
//
// A tile's deferred epilogue runs beside the next tile's mainloop, and its stores are bulk copies. They are complete in
// memory when the deferred epilogue of the next tile begins: then the warp arrives at the tile's `stored` barrier.
template <LayerKernelConfig kLayer>
class LayerGradient {
 public:
  UNIEP_DEVICE explicit LayerGradient(LayerStorage<kLayer>& shared) : shared_(shared) {}

  UNIEP_DEVICE const TensorMap& z() const { return shared_.call.gradient_maps[0]; }
  UNIEP_DEVICE const TensorMap& dz() const { return shared_.call.gradient_maps[1]; }
  UNIEP_DEVICE const TensorMap& activation() const { return shared_.call.gradient_maps[2]; }
  UNIEP_DEVICE int32_t columns() const { return static_cast<int32_t>(shared_.call.intermediate); }
  UNIEP_DEVICE float* prob_sums(int32_t chunk) const {
    return shared_.call.prob_chunks + static_cast<int64_t>(chunk) * shared_.call.prob_stride;
  }
  UNIEP_DEVICE float prob(const WarpTile& tile, int32_t row) const {
    return row < tile.rows ? __ldg(&shared_.call.program.rows[tile.row + row].prob) : 0.0f;
  }

  // One lane, before a tile's first transfer. The first call of a launch is of no tile. `calls`: the calls before.
  UNIEP_DEVICE void begin_tile(uint32_t& calls) const {
    disturb(running_call(shared_), DisturbedAt::kTile);
    ptx::bulk_wait_complete<0>();
    if (calls >= 2) arrive(calls - 2);
    ++calls;
  }

  // One lane, after all deferred epilogues of the launch.
  UNIEP_DEVICE void end_tiles(uint32_t calls) const {
    ptx::bulk_wait_complete<0>();
    if (calls >= 2) arrive(calls - 2);
    if (calls >= 1) arrive(calls - 1);
  }

 private:
  // Tiles take the slots of the task ring in turn.
  UNIEP_DEVICE void arrive(uint32_t tile) const { ptx::mbarrier_arrive(shared_.stored[tile % kLayerTaskSlots]); }

  LayerStorage<kLayer>& shared_;
};

}  // namespace uniep::cuda
