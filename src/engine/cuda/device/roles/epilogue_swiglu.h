#pragma once

#include "engine/cuda/device/roles/epilogue.h"

namespace uniep::cuda {

// FC1: the accumulators' first half is gate columns, the second half the matching up columns. Rounds z at once; a step
// writes 16 columns of z's halves and computes the same columns of a from the rounded z.
template <GemmConfig kConfig>
class SwigluEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kSteps = kConfig.tile_n / 2 / kStripColumns;
  static_assert(3 * kStripBytes <= kStagingBlockBytes, "gate, up and a are staged side by side");

  UNIEP_DEVICE SwigluEpilogue(const GemmArguments& arguments, void* const* outputs, uint32_t staging)
      : arguments_(arguments), z_(static_cast<BFloat16*>(outputs[0])), staging_(staging) {}

  UNIEP_DEVICE void finish(const WarpTile& tile, const float (&d)[kCount]) {
    tile_ = tile;
    if (tile.exists) {
      const int32_t row = static_cast<int32_t>(ptx::lane_index()) / 4;
      prob_[0] = row_prob(arguments_, tile, row);
      prob_[1] = row_prob(arguments_, tile, row + 8);
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) rounded_[i] = pack_bfloat16(d[2 * i], d[2 * i + 1]);
  }

  template <int kStep>
  UNIEP_DEVICE void step(const WarpTile& /*next*/) {
    if (!tile_.exists) return;
    const uint32_t* const gate = rounded_ + kStep * 4;
    const uint32_t* const up = rounded_ + kCount / 4 + kStep * 4;
    const int32_t column = tile_.column + kStep * kStripColumns;
    const int32_t left = arguments_.n_extent - column;
    const uint32_t up_strip = staging_ + kStripBytes;
    const uint32_t a_strip = staging_ + 2 * kStripBytes;
    if (z_ != nullptr) {
      put_strip(staging_, gate[0], gate[1], gate[2], gate[3]);
      put_strip(up_strip, up[0], up[1], up[2], up[3]);
    }
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float prob = prob_[i % 2];
      a[i] = pack_bfloat16(swiglu(unpack_low(gate[i]), unpack_low(up[i]), prob),
                           swiglu(unpack_high(gate[i]), unpack_high(up[i]), prob));
    }
    put_strip(a_strip, a[0], a[1], a[2], a[3]);
    __syncwarp();
    if (z_ != nullptr) {
      BFloat16* const gate_pointer = z_ + tile_.row * arguments_.output_leading + column;
      write_strip(staging_, {gate_pointer, arguments_.output_leading, tile_.rows, left});
      write_strip(up_strip, {gate_pointer + arguments_.n_extent, arguments_.output_leading, tile_.rows, left});
    }
    const int64_t leading = arguments_.n_extent;
    write_strip(a_strip, {arguments_.activation + tile_.row * leading + column, leading, tile_.rows, left});
    __syncwarp();
  }

 private:
  const GemmArguments& arguments_;
  BFloat16* const z_;
  const uint32_t staging_;
  WarpTile tile_;
  float prob_[2];
  uint32_t rounded_[kCount / 2];  // gate, then up
};

}  // namespace uniep::cuda
