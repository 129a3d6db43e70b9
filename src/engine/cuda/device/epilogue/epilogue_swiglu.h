#pragma once

#include "engine/cuda/device/epilogue/epilogue.h"

namespace uniep::cuda {

// A warp's strip of 16 columns of z's two halves and the same columns of a, staged side by side.
static_assert(3 * kStripBytes <= kStagingBlockBytes, "gate, up and a are staged side by side");

template <ExpertConfig kExpert>
UNIEP_DEVICE auto expert_activation() {
  return ExpertActivation<kExpert.activation, kExpert.weighs_z>(
      {float_from_bits(kExpert.alpha), float_from_bits(kExpert.gate_limit), float_from_bits(kExpert.up_limit),
       float_from_bits(kExpert.up_offset)});
}

// a of four fragments, from the rounded z. `up` may be null where there is no gate.
template <ExpertConfig kExpert>
UNIEP_DEVICE void activate_fragments(const uint32_t* gate, const uint32_t* up, const float (&prob)[2],
                                     uint32_t (&a)[4]) {
  const auto expert = expert_activation<kExpert>();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float weight = kExpert.weighs_output ? 1.0f : prob[i % 2];
    const uint32_t factor = kExpert.gated() ? up[i] : 0;
    a[i] = pack_bfloat16(expert.activate(unpack_low(gate[i]), unpack_low(factor), weight),
                         expert.activate(unpack_high(gate[i]), unpack_high(factor), weight));
  }
}

// Stages the rounded z and a from it.
template <ExpertConfig kExpert>
UNIEP_DEVICE void stage_swiglu_strip(uint32_t staging, const uint32_t* gate, const uint32_t* up,
                                     const float (&prob)[2]) {
  put_strip(staging, gate[0], gate[1], gate[2], gate[3]);
  put_strip(staging + kStripBytes, up[0], up[1], up[2], up[3]);
  uint32_t a[4];
  activate_fragments<kExpert>(gate, up, prob, a);
  put_strip(staging + 2 * kStripBytes, a[0], a[1], a[2], a[3]);
  __syncwarp();
}

// Writes this lane's 16 bytes of each part, zeros where the row does not exist. `gate` may be null: no z then.
UNIEP_DEVICE void write_swiglu_strip(uint32_t staging, bool row_exists, BFloat16* gate, int64_t gate_to_up,
                                     BFloat16* activation) {
  if (gate != nullptr) {
    ptx::store_global_16(gate, strip_values(staging, row_exists));
    ptx::store_global_16(gate + gate_to_up, strip_values(staging + kStripBytes, row_exists));
  }
  ptx::store_global_16(activation, strip_values(staging + 2 * kStripBytes, row_exists));
}

// FC1: the accumulators' first half is gate columns, the second half the matching up columns. Rounds z at once; a step
// writes a strip of 16 columns of z's halves and computes the same columns of a from the rounded z.
template <GemmConfig kConfig>
class SwigluEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kSteps = kConfig.tile_n / 2 / kStripColumns;
  static constexpr bool kRolled = true;

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
      stage_swiglu_strip<kConfig.expert>(staging_, gate_, up_, prob_);
      const int32_t lane = static_cast<int32_t>(ptx::lane_index());
      if (lane % 2 * kChunkColumns < columns_left_) {
        write_swiglu_strip(staging_, lane / 2 < rows_, z_ == nullptr ? nullptr : z_ + z_offset_, arguments_.n_extent,
                           arguments_.activation + a_offset_);
      }
      __syncwarp();
    }
    columns_left_ -= kStripColumns;
    z_offset_ += kStripColumns;
    a_offset_ += kStripColumns;
    rotate_registers<4>(gate_);
    rotate_registers<4>(up_);
  }

 private:
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
