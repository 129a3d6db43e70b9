#pragma once

#include "engine/cuda/device/epilogue/staging.h"
#include "engine/cuda/device/shared_memory/layer_storage.h"

namespace uniep::cuda {

// The biases of a tile of FC1 or FC2, which a math warp adds to its accumulators before it rounds them. They wait in
// the warp's staging, which nobody else uses between the last deferred step of the tile before and the tile's end: 16
// bytes a lane, of FC1 gate and then up, where there is a gate. Columns beyond the matrix get none.
template <LayerKernelConfig kLayer>
class TileBias {
 public:
  static constexpr int kCount = kLayer.gemm.tile_n / 2;
  static constexpr bool kExists = kLayer.gemm.expert.bias && kLayer.gemms == LayerGemms::kForward;
  static_assert(kLayer.gemm.tile_n * 2 <= kStagingBlockBytes && kLayer.gemm.tile_n <= 32 * kChunkColumns,
                "a tile's biases are one load of the warp");

  UNIEP_DEVICE static void fetch(const LayerTask& task, const RankCall& call, uint32_t staging) {
    constexpr int32_t kHalfColumns = kLayer.gemm.tile_n / 2, kLanesOfHalf = kHalfColumns / kChunkColumns;
    const bool second = task.has(LayerTask::kSecond), in_halves = kHasGateAndUp<kLayer> && !second;
    const auto lane = static_cast<int32_t>(ptx::lane_index());
    const int32_t half = lane / kLanesOfHalf, in_half = lane % kLanesOfHalf * kChunkColumns;
    const int32_t column = in_halves ? in_half : lane * kChunkColumns;
    const bool exists = task.has(LayerTask::kStore) && half < 2 && column < task.columns();
    const BFloat16* const vector = (second ? call.b2 : call.b1).of(task.expert);
    const int64_t at = task.column() + column + (in_halves ? half * call.intermediate : 0);
    if (half < 2) ptx::copy_async_16(staging + lane * 16, exists ? vector + at : vector, exists);
    ptx::copy_async_commit();
  }

  UNIEP_DEVICE explicit TileBias(uint32_t staging) : pairs_(staging + ptx::lane_index() % 4 * 4) {
    if constexpr (kExists) {
      ptx::copy_async_wait<0>();
      __syncwarp();
    }
  }

  // Accumulators `from` and `from + 1`, which are neighbours in a row, with their biases.
  UNIEP_DEVICE uint32_t rounded(const float (&d)[kCount], int from) const {
    if constexpr (kExists) {
      const uint32_t pair = ptx::load_shared_4(pairs_ + from / 4 * 16);  // a lane has two of each 8 columns
      return pack_bfloat16(add(d[from], unpack_low(pair)), add(d[from + 1], unpack_high(pair)));
    } else {
      return pack_bfloat16(d[from], d[from + 1]);
    }
  }

 private:
  const uint32_t pairs_;
};

}  // namespace uniep::cuda
