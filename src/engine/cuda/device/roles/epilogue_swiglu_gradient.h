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
// z arrives strip by strip in a ring of two slots (gate and up), fetched two strips ahead, across tiles; dz and a leave
// through the same slots. A tile that does not exist lies beyond the last column: nothing of it is read or written,
// without a branch around the accumulators.
template <GemmConfig kConfig>
class SwigluGradientEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kStripsInChunk = kProbChunkColumns / kStripColumns;
  static constexpr int kSteps = kConfig.tile_n / kStripColumns;
  static constexpr int kSlots = 2;
  static constexpr bool kRolled = true;
  static_assert(kSteps % kStripsInChunk == 0, "a tile holds whole chunks of dprob's sum");
  static_assert(kSteps % kSlots == 0, "a tile begins at the ring's first slot");
  static_assert(2 * kSlots * kStripBytes <= kStagingBlockBytes, "the ring is the warp's staging");

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
      write();
      if (strip_ % kStripsInChunk == kStripsInChunk - 1) write_prob_sum();
      fetch_ahead(next);
      columns_left_ -= kStripColumns;
      z_offset_ += kStripColumns;
      a_offset_ += kStripColumns;
      ++strip_;
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
    z_offset_ = lane_offset(tile, arguments_.output_leading);
    a_offset_ = lane_offset(tile, arguments_.n_extent);
    sum_offset_ = tile.column / kProbChunkColumns * arguments_.prob_stride + tile.row + lane / 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) da_[i] = copy_opaquely(d[i]);
  }

 private:
  UNIEP_DEVICE uint32_t gate_strip() const { return staging_ + strip_ % kSlots * (2 * kStripBytes); }
  UNIEP_DEVICE uint32_t up_strip() const { return gate_strip() + kStripBytes; }

  // Where this lane's 16 bytes of the tile's first strip are, in elements.
  UNIEP_DEVICE static int64_t lane_offset(const WarpTile& tile, int64_t leading) {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    return (tile.row + lane / 2) * leading + tile.column + lane % 2 * kChunkColumns;
  }

  UNIEP_DEVICE void begin_strip() {
    ptx::copy_async_wait<kSlots - 1>();
    __syncwarp();
    if (strip_ % kStripsInChunk == 0) prob_sum_[0] = prob_sum_[1] = 0.0f;
    get_strip(gate_strip(), gate_);
    get_strip(up_strip(), up_);
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

  UNIEP_DEVICE void write() {
    const uint32_t gates = gate_strip();
    const uint32_t ups = up_strip();
    __syncwarp();
    put_strip(gates, gate_[0], gate_[1], gate_[2], gate_[3]);
    put_strip(ups, up_[0], up_[1], up_[2], up_[3]);
    __syncwarp();
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    const bool column_exists = lane % 2 * kChunkColumns < columns_left_;
    const bool row_exists = lane / 2 < rows_;
    const ptx::Vector16 dz_gate = strip_values(gates, row_exists);
    const ptx::Vector16 dz_up = strip_values(ups, row_exists);
    __syncwarp();
    put_strip(gates, activation_[0], activation_[1], activation_[2], activation_[3]);
    if (column_exists) {
      ptx::store_global_16(dz_ + z_offset_, dz_gate);
      ptx::store_global_16(dz_ + z_offset_ + arguments_.n_extent, dz_up);
    }
    __syncwarp();
    const ptx::Vector16 activation = strip_values(gates, row_exists);
    if (column_exists) ptx::store_global_16(arguments_.activation + a_offset_, activation);
    __syncwarp();
  }

  // z of the strip kSlots further on, into the slot that has just become free.
  UNIEP_DEVICE void fetch_ahead(const WarpTile& next) {
    const bool same_tile = strip_ + kSlots < kSteps;
    const int32_t strips = same_tile ? kSlots : strip_ + kSlots - kSteps;
    const int32_t columns = (same_tile ? columns_left_ : arguments_.n_extent - next.column) - strips * kStripColumns;
    const int64_t offset =
        (same_tile ? z_offset_ : lane_offset(next, arguments_.output_leading)) + strips * kStripColumns;
    const uint32_t lane = ptx::lane_index();
    const bool exists = static_cast<int32_t>(lane % 2 * kChunkColumns) < columns &&
                        static_cast<int32_t>(lane / 2) < (same_tile ? rows_ : next.rows);
    const BFloat16* const source = exists ? arguments_.saved + offset : arguments_.saved;
    ptx::copy_async_16(strip_chunk(gate_strip(), lane / 2, lane % 2), source, exists);
    ptx::copy_async_16(strip_chunk(up_strip(), lane / 2, lane % 2), source + (exists ? arguments_.n_extent : 0),
                       exists);
    ptx::copy_async_commit();
  }

  UNIEP_DEVICE void write_prob_sum() {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      // Lane q of a quad holds partial q: (p0 + p1) + (p2 + p3).
      const float own = prob_sum_[half];
      const float pair_sum = add(own, __shfl_xor_sync(0xffffffffu, own, 1));
      const float sum = add(pair_sum, __shfl_xor_sync(0xffffffffu, pair_sum, 2));
      // The chunk's first column exists if any does.
      if (lane % 4 == 0 && columns_left_ + (kProbChunkColumns - kStripColumns) > 0) {
        arguments_.prob_chunks[sum_offset_ + half * 8] = lane / 4 + half * 8 < rows_ ? sum : 0.0f;
      }
    }
    sum_offset_ += arguments_.prob_stride;
  }

  const GemmArguments& arguments_;
  BFloat16* const dz_;
  const uint32_t staging_;
  int32_t columns_left_ = 0;  // of the tile, from the next strip on
  int32_t rows_ = 0;
  int32_t strip_ = 0;
  int64_t z_offset_ = 0;  // elements: this lane's 16 bytes of the strip, in z and dz
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
