#pragma once

#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/tma.h"
#include "engine/cuda/device/roles/epilogue.h"

namespace uniep::cuda {

// FC2's dgrad: from da (fp32, the accumulators) and z: a again, dz, and dprob's sums of 64 columns.
//
// All of it is late work, from a copy of the accumulators in registers: chunks of 64 columns, each in four steps of 16
// columns and one that ends the chunk's sum. z, dz and a move by TMA, 32 columns at a time, so that no math warp waits
// for memory: z comes into one of two buffers while the other is worked on, across tiles; dz takes its place and leaves
// from there, beside a.
//
// A tile that does not exist lies beyond the last column, where TMA reads zero and writes nothing. A row that does not
// exist gets z, da and prob of +0, from which every result is +0.
template <GemmConfig kConfig>
class SwigluGradientEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kChunks = kConfig.tile_n / kProbChunkColumns;
  static constexpr int kStripsInChunk = kProbChunkColumns / kStripColumns;
  static constexpr int kStepsInGroup = kStripsInChunk + 1;
  static constexpr int kSteps = kChunks * kStepsInGroup;
  static constexpr bool kRolled = true;
  static constexpr int kStripRegisters = kStripColumns / 2;
  static constexpr int kChunkRegisters = kProbChunkColumns / 2;
  static constexpr int kParked = 4;
  static constexpr int kHeld = kCount - kParked;
  static_assert(kProbChunkColumns == 2 * kTransferColumns && kTransferColumns == 2 * kStripColumns,
                "a chunk takes both buffers in turn, two strips each");

  UNIEP_DEVICE SwigluGradientEpilogue(const GemmArguments& arguments, void* const* /*outputs*/, uint32_t staging)
      : arguments_(arguments), staging_(staging) {
    if (ptx::lane_index() == 0) {
      for (int buffer = 0; buffer < kBuffers; ++buffer) ptx::mbarrier_init(landed(buffer), 1);
      ptx::fence_mbarrier_init();
      fetch(0, WarpTile::kBeyond, 0);
    }
    __syncwarp();
  }

  // Between the K blocks of the next tile: 16 columns, z becomes dz in place.
  template <int kStrip>
  UNIEP_DEVICE void step(const WarpTile& next) {
    constexpr int32_t kBuffer = kStrip / kStripsInTransfer;
    constexpr uint32_t kFirstPlace = 2 * (kStrip % kStripsInTransfer);
    constexpr int kValues = kStrip * kStripRegisters;
    if constexpr (kFirstPlace == 0) begin_transfer(next, kBuffer);
    const uint32_t lane = ptx::lane_index();
    const uint32_t place = place_of(lane % 16, kFirstPlace + lane / 16);
    const uint32_t address = gate_block(kBuffer) + place;
    uint32_t gate[4];
    uint32_t up[4];
    uint32_t a[4];
    ptx::load_matrix_x4(address, gate[0], gate[1], gate[2], gate[3]);
    ptx::load_matrix_x4(address + kTransferBytes, up[0], up[1], up[2], up[3]);
    if (rows_ < kBlockRows) clear_padding(gate, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float prob = prob_[i % 2];
      const SwigluGradient low = swiglu_gradient(unpack_low(gate[i]), unpack_low(up[i]), prob, da_[kValues + 2 * i]);
      const SwigluGradient high =
          swiglu_gradient(unpack_high(gate[i]), unpack_high(up[i]), prob, da_[kValues + 2 * i + 1]);
      a[i] = pack_bfloat16(low.activation, high.activation);
      gate[i] = pack_bfloat16(low.gate, high.gate);
      up[i] = pack_bfloat16(low.up, high.up);
      prob_sum_[i % 2] = add_prob_term(prob_sum_[i % 2], da_[kValues + 2 * i], low.unweighted);
      prob_sum_[i % 2] = add_prob_term(prob_sum_[i % 2], da_[kValues + 2 * i + 1], high.unweighted);
    }
    ptx::store_matrix_x4(address, gate[0], gate[1], gate[2], gate[3]);
    ptx::store_matrix_x4(address + kTransferBytes, up[0], up[1], up[2], up[3]);
    ptx::store_matrix_x4(activation_block() + place, a[0], a[1], a[2], a[3]);
    if constexpr (kFirstPlace != 0) end_transfer(kBuffer);
  }

  // After the strips of a chunk.
  UNIEP_DEVICE void end_group(const WarpTile& /*next*/) {
    write_prob_sum();
    column_ += kProbChunkColumns;
    ++chunk_;
    phase_ ^= 1;
    prob_sum_[0] = prob_sum_[1] = 0.0f;
    rotate_registers<kChunkRegisters>(da_);
    if (chunk_ == kChunks - 1) unpark();
  }

  UNIEP_DEVICE void finish(const WarpTile& tile, const float (&d)[kCount]) {
    row_ = tile.row;
    column_ = tile.column;
    rows_ = tile.rows;
    chunk_ = 0;
    const int32_t row = static_cast<int32_t>(ptx::lane_index()) / 4;
    prob_[0] = row_prob(arguments_, tile, row);
    prob_[1] = row_prob(arguments_, tile, row + 8);
    // This mask is also what makes copies: were the kept values still accumulators for the compiler, the next
    // products would have to wait for the last use of each (ptxas then serialises wgmma, C7520).
    const uint32_t exists[2] = {row < tile.rows ? ~0u : 0u, row + 8 < tile.rows ? ~0u : 0u};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) da_[i] = float_from_bits(bits_of_float(d[i]) & exists[i / 2 % 2]);
    ptx::store_shared_16(parked(), {bits_of_float(d[kHeld]) & exists[0], bits_of_float(d[kHeld + 1]) & exists[0],
                                    bits_of_float(d[kHeld + 2]) & exists[1], bits_of_float(d[kHeld + 3]) & exists[1]});
  }

  // Before the CTA ends: no copy to or from its shared memory is under way.
  UNIEP_DEVICE void drain() {
    ptx::mbarrier_wait(landed(0), phase_, "z");
    ptx::bulk_wait_read<0>();
  }

 private:
  static constexpr int kBuffers = 2;
  static constexpr int kStripsInTransfer = kTransferColumns / kStripColumns;
  static constexpr uint32_t kTransferBytes = kBlockRows * kTransferColumns * 2;
  // Gate and up of each buffer, a, what waits for registers, the barriers.
  static constexpr uint32_t kActivationAt = 2 * kBuffers * kTransferBytes;
  static constexpr uint32_t kParkedAt = kActivationAt + kTransferBytes;
  static constexpr uint32_t kBarriersAt = kParkedAt + kParked * 4 * ptx::kThreadsPerWarp;
  static_assert(kBarriersAt + kBuffers * 8 <= staging_bytes(kConfig), "the staging is too small");
  static_assert(staging_bytes(kConfig) % 512 == 0, "the 64-byte swizzle repeats after 512 bytes");

  // 16-byte chunk c of row r, as the 64-byte swizzle puts it: neither side has bank conflicts.
  UNIEP_DEVICE static uint32_t place_of(uint32_t row, uint32_t chunk) {
    return row * (kTransferColumns * 2) + ((chunk ^ (row / 2 & 3u)) << 4);
  }
  UNIEP_DEVICE uint32_t gate_block(int32_t buffer) const {
    return staging_ + buffer * 2 * kTransferBytes;
  }
  UNIEP_DEVICE uint32_t activation_block() const {
    return staging_ + kActivationAt;
  }
  UNIEP_DEVICE uint64_t& landed(int32_t buffer) const {
    return *static_cast<uint64_t*>(__cvta_shared_to_generic(staging_ + kBarriersAt + buffer * 8));
  }

  // The last few values wait in shared memory, for want of registers.
  UNIEP_DEVICE uint32_t parked() const {
    return staging_ + kParkedAt + ptx::lane_index() * 16;
  }
  UNIEP_DEVICE void unpark() {
    const ptx::Vector16 values = ptx::load_shared_16(parked());
#pragma unroll
    for (int i = 0; i < kParked; ++i) da_[kChunkRegisters - kParked + i] = float_from_bits(values.word[i]);
  }

  // One lane.
  UNIEP_DEVICE void fetch(int32_t row, int32_t column, int32_t buffer) const {
    uint64_t& barrier = landed(buffer);
    ptx::mbarrier_arrive_expect_bytes(barrier, 2 * kTransferBytes);
    ptx::tma_load_3d(gate_block(buffer), arguments_.z, barrier, column, row, 0);
  }

  // What the last transfer left from is free when it has been read: then the next one's z comes into its buffer.
  UNIEP_DEVICE void begin_transfer(const WarpTile& next, int32_t buffer) {
    if (ptx::lane_index() == 0) {
      ptx::bulk_wait_read<0>();
      const bool same_chunk = buffer == 0;
      const bool same_tile = same_chunk || chunk_ + 1 < kChunks;
      const int32_t column = column_ + (same_chunk ? kTransferColumns : kProbChunkColumns);
      fetch(same_tile ? row_ : next.row, same_tile ? column : next.column, 1 - buffer);
    }
    __syncwarp();
    ptx::mbarrier_wait(landed(buffer), phase_, "z");
  }

  UNIEP_DEVICE void end_transfer(int32_t buffer) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::lane_index() == 0) {
      const int32_t column = column_ + buffer * kTransferColumns;
      ptx::tma_store_3d(arguments_.dz, gate_block(buffer), column, row_, 0);
      ptx::tma_store_3d(arguments_.recomputed, activation_block(), column, row_, 0);
      ptx::bulk_commit();
    }
    __syncwarp();
  }

  // What lies in z's padding is anybody's.
  UNIEP_DEVICE void clear_padding(uint32_t (&gate)[4], uint32_t (&up)[4]) const {
    const int32_t row = static_cast<int32_t>(ptx::lane_index()) / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = row + i % 2 * 8 < rows_;
      gate[i] = exists ? gate[i] : 0;
      up[i] = exists ? up[i] : 0;
    }
  }

  UNIEP_DEVICE void write_prob_sum() {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    float* const sums = arguments_.prob_chunks + column_ / kProbChunkColumns * arguments_.prob_stride + row_;
    const bool exists = column_ < arguments_.n_extent;  // the chunk's first column, if any
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      // Lane q of a quad holds partial q: (p0 + p1) + (p2 + p3).
      const float own = prob_sum_[half];
      const float pair_sum = add(own, __shfl_xor_sync(0xffffffffu, own, 1));
      const float sum = add(pair_sum, __shfl_xor_sync(0xffffffffu, pair_sum, 2));
      ptx::store_global_float_if(lane % 4 == 0 && exists, sums + lane / 4 + half * 8, sum);
    }
  }

  const GemmArguments& arguments_;
  const uint32_t staging_;
  int32_t row_ = 0;
  int32_t column_ = WarpTile::kBeyond;  // of the chunk
  int32_t rows_ = 0;
  int32_t chunk_ = 0;
  uint32_t phase_ = 0;  // of both buffers' barriers in this chunk
  float prob_[2] = {};
  float prob_sum_[2] = {};
  float da_[kHeld];
};

}  // namespace uniep::cuda
