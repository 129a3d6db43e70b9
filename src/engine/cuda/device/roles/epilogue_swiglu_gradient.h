#pragma once

#include "engine/cuda/device/roles/epilogue.h"

namespace uniep::cuda {

// A copy that the compiler can not undo: were the kept values still accumulators for it, the next products would have
// to wait for the last use of each (ptxas then serialises wgmma, C7520).
UNIEP_DEVICE float copy_opaquely(float value) {
  uint32_t zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return float_from_bits(bits_of_float(value) ^ zero);
}

// FC2's dgrad: from da (fp32, the accumulators) and z: a again, dz, and dprob's sums of 64 columns.
//
// All of it is late work, in strips of 16 columns, from a copy of the accumulators: that needs a tile of 128 columns.
// z arrives strip by strip in a ring of two slots (gate and up), fetched two strips ahead, across tiles; dz leaves
// through the same slots, a through a strip of its own. A tile that does not exist lies beyond the last column: nothing
// of it is read or written, without a branch around the accumulators.
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
  static_assert((2 * kSlots + 1) * kStripBytes <= staging_bytes(kConfig), "the ring and a's strip are the staging");

  UNIEP_DEVICE SwigluGradientEpilogue(const GemmArguments& arguments, void* const* outputs, uint32_t staging)
      : arguments_(arguments), dz_(static_cast<BFloat16*>(outputs[0])), staging_(staging) {}

  // Between the K blocks of `next`.
  UNIEP_DEVICE void step(const WarpTile& next) {
    compute();
    write();
    if (strip_ % kStripsInChunk == kStripsInChunk - 1) write_prob_sum();
    fetch_ahead(next);
    columns_left_ -= kStripColumns;
    z_offset_ += kStripColumns;
    a_offset_ += kStripColumns;
    ++strip_;
    rotate_registers<8>(da_);
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
  UNIEP_DEVICE uint32_t gate_strip() const {
    return staging_ + strip_ % kSlots * (2 * kStripBytes);
  }
  UNIEP_DEVICE uint32_t up_strip() const {
    return gate_strip() + kStripBytes;
  }
  UNIEP_DEVICE uint32_t a_strip() const {
    return staging_ + kSlots * (2 * kStripBytes);
  }

  // Where this lane's 16 bytes of the tile's first strip are, in elements.
  UNIEP_DEVICE static int64_t lane_offset(const WarpTile& tile, int64_t leading) {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    return (tile.row + lane / 2) * leading + tile.column + lane % 2 * kChunkColumns;
  }

  // z becomes dz in place.
  UNIEP_DEVICE void compute() {
    ptx::copy_async_wait<kSlots - 1>();
    __syncwarp();
    if (strip_ % kStripsInChunk == 0) prob_sum_[0] = prob_sum_[1] = 0.0f;
    uint32_t gate[4];
    uint32_t up[4];
    uint32_t a[4];
    get_strip(gate_strip(), gate);
    get_strip(up_strip(), up);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float prob = prob_[i % 2];
      const SwigluGradient low = swiglu_gradient(unpack_low(gate[i]), unpack_low(up[i]), prob, da_[2 * i]);
      const SwigluGradient high = swiglu_gradient(unpack_high(gate[i]), unpack_high(up[i]), prob, da_[2 * i + 1]);
      a[i] = pack_bfloat16(low.activation, high.activation);
      gate[i] = pack_bfloat16(low.gate, high.gate);
      up[i] = pack_bfloat16(low.up, high.up);
      prob_sum_[i % 2] = add(add(prob_sum_[i % 2], low.prob_term), high.prob_term);
    }
    put_strip(a_strip(), a[0], a[1], a[2], a[3]);
    put_strip(gate_strip(), gate[0], gate[1], gate[2], gate[3]);
    put_strip(up_strip(), up[0], up[1], up[2], up[3]);
  }

  UNIEP_DEVICE void write() {
    __syncwarp();
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    if (lane % 2 * kChunkColumns < columns_left_) {
      const bool exists = lane / 2 < rows_;
      ptx::store_global_16(dz_ + z_offset_, strip_values(gate_strip(), exists));
      ptx::store_global_16(dz_ + z_offset_ + arguments_.n_extent, strip_values(up_strip(), exists));
      ptx::store_global_16(arguments_.activation + a_offset_, strip_values(a_strip(), exists));
    }
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
  float da_[kCount];
};

}  // namespace uniep::cuda
