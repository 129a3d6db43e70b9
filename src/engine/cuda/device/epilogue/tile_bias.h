#pragma once

#include "engine/cuda/device/epilogue/staging.h"
#include "engine/cuda/device/shared_memory/layer_storage.h"

namespace uniep::cuda {

// The biases of a tile of FC1 or FC2, as a lane of a math warp adds them to its accumulators: of each 8 columns it has
// two. Columns beyond the matrix get none. Without biases it is nothing.
template <LayerKernelConfig kLayer>
class TileBias {
 public:
  static constexpr int kCount = kLayer.gemm.tile_n / 2;
  static constexpr bool kExists = kLayer.gemm.expert.bias && kLayer.gemms == LayerGemms::kForward;

  UNIEP_DEVICE TileBias(const LayerTask& task, const RankCall& call) {
    if constexpr (kExists) {
      const bool second = task.has(LayerTask::kSecond);
      const int32_t lane_column = static_cast<int32_t>(ptx::lane_index()) % 4 * 2;
      const BFloat16* const first = (second ? call.b2 : call.b1).of(task.expert) + task.column() + lane_column;
      half_[0] = first;
      half_[1] = first + (second ? kHalfColumns : call.intermediate);
      columns_[0] = task.has(LayerTask::kStore) ? task.columns() : 0;
      columns_[1] = second ? columns_[0] - kHalfColumns : columns_[0];
    }
  }

  // Accumulators `from` and `from + 1`, which are neighbours in a row, with their biases.
  UNIEP_DEVICE uint32_t rounded(const float (&d)[kCount], int from) const {
    if constexpr (kExists) {
      const int half = from / (kCount / 2), column = from % (kCount / 2) / 4 * 8;
      const auto* const at = reinterpret_cast<const uint32_t*>(half_[half] + column);
      const uint32_t pair = column < columns_[half] ? __ldg(at) : 0;
      return pack_bfloat16(add(d[from], unpack_low(pair)), add(d[from + 1], unpack_high(pair)));
    } else {
      return pack_bfloat16(d[from], d[from + 1]);
    }
  }

 private:
  static constexpr int32_t kHalfColumns = kLayer.gemm.tile_n / 2;

  const BFloat16* half_[2] = {};
  int32_t columns_[2] = {};
};

}  // namespace uniep::cuda
