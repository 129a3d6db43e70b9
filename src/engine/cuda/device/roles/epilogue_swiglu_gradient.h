#pragma once

#include "engine/cuda/device/roles/epilogue.h"

namespace uniep::cuda {

// A copy that the compiler can not undo: were the kept values still accumulators for it, the next products would have to
// wait for the last use of each (ptxas then serialises wgmma, C7520).
UNIEP_DEVICE float copy_opaquely(float value) {
  uint32_t zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return float_from_bits(bits_of_float(value) ^ zero);
}

// FC2's dgrad: from da (fp32, the accumulators) and z: a again, dz, and dprob's sums of 64 columns.
//
// All of it is late work, in strips of 16 columns, from a copy of the accumulators: that needs a tile of 128 columns.
// z arrives in two pairs of blocks (gate, up) of 64 columns, fetched while the tile before is worked off; dz and a leave
// through the same blocks. A tile that does not exist lies beyond the last column: nothing of it is read or written,
// without a branch around the accumulators.
template <GemmConfig kConfig>
class SwigluGradientEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kStripsInPart = kBlockColumns / kStripColumns;
  static constexpr int kSteps = kConfig.tile_n / kStripColumns;
  static constexpr bool kRolled = true;
  static_assert(kBlockColumns == kProbChunkColumns, "a pair of blocks is one chunk of dprob's sum");
  static_assert(kConfig.tile_n == 2 * kBlockColumns, "z has room for two parts of 64 columns");

  UNIEP_DEVICE SwigluGradientEpilogue(const GemmArguments& arguments, void* const* outputs, uint32_t staging)
      : arguments_(arguments), dz_(static_cast<BFloat16*>(outputs[0])), staging_(staging) {}

  // Between the K blocks of `next`.
  template <int kPhase>
  UNIEP_DEVICE void phase(const WarpTile& next) {
    static_assert(late_phases(kConfig) == 3, "compute twice, then write");
    if constexpr (kPhase == 0) begin_strip();
    if constexpr (kPhase < 2) {
      compute<2 * kPhase>();
    } else {
      write(next);
      rotate_registers<8>(da_);
    }
  }

  UNIEP_DEVICE void finish(const WarpTile& tile, const float (&d)[kCount]) {
    columns_left_ = arguments_.n_extent - tile.column;
    rows_ = tile.rows;
    strip_ = 0;
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    prob_[0] = row_prob(arguments_, tile, lane / 4);
    prob_[1] = row_prob(arguments_, tile, lane / 4 + 8);
    const int64_t row = tile.row + lane / 2;
    const int32_t column = tile.column + lane % 2 * kChunkColumns;
    dz_offset_ = row * arguments_.output_leading + column;
    a_offset_ = row * arguments_.n_extent + column;
    sum_offset_ = tile.column / kProbChunkColumns * arguments_.prob_stride + tile.row + lane / 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) da_[i] = copy_opaquely(d[i]);
  }

 private:
  UNIEP_DEVICE uint32_t gate_block(int part) const { return staging_ + part * (2 * kStagingBlockBytes); }

  UNIEP_DEVICE void fetch(const WarpTile& tile, int part) {
    const int32_t column = tile.column + part * kBlockColumns;
    const int64_t leading = 2 * static_cast<int64_t>(arguments_.n_extent);
    const int32_t columns = arguments_.n_extent - column;
    const int64_t offset = tile.row * leading + column;
    const uint32_t gates = gate_block(part);
    fetch_block(gates, arguments_.saved, offset, leading, tile.rows, columns);
    fetch_block(gates + kStagingBlockBytes, arguments_.saved, offset + arguments_.n_extent, leading, tile.rows,
                columns);
  }

  UNIEP_DEVICE int part() const { return strip_ / kStripsInPart % 2; }
  UNIEP_DEVICE int pair() const { return strip_ % kStripsInPart; }

  UNIEP_DEVICE void begin_strip() {
    if (pair() == 0) {
      ptx::copy_async_wait<1>();
      __syncwarp();
      prob_sum_[0] = prob_sum_[1] = 0.0f;
    }
    get_fragment(gate_block(part()), pair(), gate_);
    get_fragment(gate_block(part()) + kStagingBlockBytes, pair(), up_);
  }

  // Fragments kFirst and kFirst + 1 (this thread's upper and lower row) of the strip; z becomes dz in place.
  template <int kFirst>
  UNIEP_DEVICE void compute() {
#pragma unroll
    for (int i = kFirst; i < kFirst + 2; ++i) {
      const float prob = prob_[i % 2];
      const SwigluGradient low = swiglu_gradient(unpack_low(gate_[i]), unpack_low(up_[i]), prob, da_[2 * i]);
      const SwigluGradient high = swiglu_gradient(unpack_high(gate_[i]), unpack_high(up_[i]), prob, da_[2 * i + 1]);
      activation_[i] = pack_bfloat16(low.activation, high.activation);
      gate_[i] = pack_bfloat16(low.gate, high.gate);
      up_[i] = pack_bfloat16(low.up, high.up);
      prob_sum_[i % 2] = add(add(prob_sum_[i % 2], low.prob_term), high.prob_term);
    }
  }

  UNIEP_DEVICE void write(const WarpTile& next) {
    const uint32_t gates = gate_block(part());
    const uint32_t ups = gates + kStagingBlockBytes;
    __syncwarp();
    put_fragment(gates, pair(), gate_[0], gate_[1], gate_[2], gate_[3]);
    put_fragment(ups, pair(), up_[0], up_[1], up_[2], up_[3]);
    __syncwarp();
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    const bool column_exists = lane % 2 * kChunkColumns < columns_left_;
    const bool row_exists = lane / 2 < rows_;
    const ptx::Vector16 dz_gate = block_strip_values(gates, pair(), row_exists);
    const ptx::Vector16 dz_up = block_strip_values(ups, pair(), row_exists);
    __syncwarp();
    put_fragment(gates, pair(), activation_[0], activation_[1], activation_[2], activation_[3]);
    if (column_exists) {
      ptx::store_global_16(dz_ + dz_offset_, dz_gate);
      ptx::store_global_16(dz_ + dz_offset_ + arguments_.n_extent, dz_up);
    }
    __syncwarp();
    const ptx::Vector16 activation = block_strip_values(gates, pair(), row_exists);
    if (column_exists) ptx::store_global_16(arguments_.activation + a_offset_, activation);
    __syncwarp();
    if (pair() == kStripsInPart - 1) end_part(next);
    columns_left_ -= kStripColumns;
    dz_offset_ += kStripColumns;
    a_offset_ += kStripColumns;
    ++strip_;
  }

  // Writes dprob's sums of 64 columns and sends for the same part of the next tile's z.
  UNIEP_DEVICE void end_part(const WarpTile& next) {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      // Lane q of a quad holds partial q: (p0 + p1) + (p2 + p3).
      const float own = prob_sum_[half];
      const float pair_sum = add(own, __shfl_xor_sync(0xffffffffu, own, 1));
      const float sum = add(pair_sum, __shfl_xor_sync(0xffffffffu, pair_sum, 2));
      // The part's first column exists if any does.
      if (lane % 4 == 0 && columns_left_ + (kBlockColumns - kStripColumns) > 0) {
        arguments_.prob_chunks[sum_offset_ + half * 8] = lane / 4 + half * 8 < rows_ ? sum : 0.0f;
      }
    }
    sum_offset_ += arguments_.prob_stride;
    fetch(next, part());
    ptx::copy_async_commit();
  }

  const GemmArguments& arguments_;
  BFloat16* const dz_;
  const uint32_t staging_;
  int32_t columns_left_ = 0;  // of the tile, from the next strip on
  int32_t rows_ = 0;
  int32_t strip_ = 0;
  int64_t dz_offset_ = 0;  // elements: this lane's 16 bytes of the strip
  int64_t a_offset_ = 0;
  int64_t sum_offset_ = 0;
  float prob_[2] = {};
  float prob_sum_[2] = {};
  uint32_t gate_[4];  // the strip's fragments of z, then of dz
  uint32_t up_[4];
  uint32_t activation_[4];
  float da_[kCount];
};

}  // namespace uniep::cuda
