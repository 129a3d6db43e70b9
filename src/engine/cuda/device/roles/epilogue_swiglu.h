#pragma once

#include "engine/cuda/device/roles/epilogue.h"

namespace uniep::cuda {

// FC1: the accumulators' first half is gate columns, the second half the matching up columns. Rounds z at once; a step
// writes a strip of 16 columns of z's halves and computes the same columns of a from the rounded z.
template <GemmConfig kConfig>
class SwigluEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kSteps = kConfig.tile_n / 2 / kStripColumns;
  static constexpr bool kRolled = true;
  static_assert(3 * kStripBytes <= kStagingBlockBytes, "gate, up and a are staged side by side");

  UNIEP_DEVICE SwigluEpilogue(const GemmArguments& arguments, void* const* outputs, uint32_t staging)
      : arguments_(arguments), z_(static_cast<BFloat16*>(outputs[0])), staging_(staging) {}

  UNIEP_DEVICE void finish(const WarpTile& tile, const float (&d)[kCount]) {
    columns_left_ = tile.exists ? arguments_.n_extent - tile.column : 0;
    rows_ = tile.rows;
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    prob_[0] = tile.exists ? row_prob(arguments_, tile, lane / 4) : 0.0f;
    prob_[1] = tile.exists ? row_prob(arguments_, tile, lane / 4 + 8) : 0.0f;
    const int64_t row = tile.row + lane / 2;
    const int32_t column = tile.column + lane % 2 * kChunkColumns;
    z_offset_ = row * arguments_.output_leading + column;
    a_offset_ = row * arguments_.n_extent + column;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      gate_[i] = pack_bfloat16(d[2 * i], d[2 * i + 1]);
      up_[i] = pack_bfloat16(d[kCount / 2 + 2 * i], d[kCount / 2 + 2 * i + 1]);
    }
  }

  UNIEP_DEVICE void step(const WarpTile& /*next*/) {
    if (columns_left_ > 0) {
      compute();
      write();
    }
    columns_left_ -= kStripColumns;
    z_offset_ += kStripColumns;
    a_offset_ += kStripColumns;
    rotate_registers<4>(gate_);
    rotate_registers<4>(up_);
  }

 private:
  UNIEP_DEVICE uint32_t up_strip() const {
    return staging_ + kStripBytes;
  }
  UNIEP_DEVICE uint32_t a_strip() const {
    return staging_ + 2 * kStripBytes;
  }

  UNIEP_DEVICE void compute() {
    put_strip(staging_, gate_[0], gate_[1], gate_[2], gate_[3]);
    put_strip(up_strip(), up_[0], up_[1], up_[2], up_[3]);
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float prob = prob_[i % 2];
      a[i] = pack_bfloat16(swiglu(unpack_low(gate_[i]), unpack_low(up_[i]), prob),
                           swiglu(unpack_high(gate_[i]), unpack_high(up_[i]), prob));
    }
    put_strip(a_strip(), a[0], a[1], a[2], a[3]);
    __syncwarp();
  }

  UNIEP_DEVICE void write() {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    if (lane % 2 * kChunkColumns < columns_left_) {
      const bool exists = lane / 2 < rows_;
      if (z_ != nullptr) {
        ptx::store_global_16(z_ + z_offset_, strip_values(staging_, exists));
        ptx::store_global_16(z_ + z_offset_ + arguments_.n_extent, strip_values(up_strip(), exists));
      }
      ptx::store_global_16(arguments_.activation + a_offset_, strip_values(a_strip(), exists));
    }
    __syncwarp();
  }

  const GemmArguments& arguments_;
  BFloat16* const z_;
  const uint32_t staging_;
  int32_t columns_left_ = 0;
  int32_t rows_ = 0;
  int64_t z_offset_ = 0;  // elements: this lane's 16 bytes of the strip
  int64_t a_offset_ = 0;
  float prob_[2] = {};
  uint32_t gate_[kCount / 4];
  uint32_t up_[kCount / 4];
};

}  // namespace uniep::cuda
