#pragma once

#include "engine/cuda/device/roles/epilogue.h"

namespace uniep::cuda {

// FC2's dgrad: from da (fp32, the accumulators) and z: a again, dz, and dprob's sums of 64 columns.
//
// All of it is late work, from a copy of the accumulators in registers: chunks of 64 columns, each in four steps of 16
// columns and one that moves the chunk. z lies in shared memory in rows of 128 bytes; dz takes its place, a has a block
// of its own. Both leave in whole lines; then z of the next chunk is fetched, across tiles.
//
// A tile that does not exist lies beyond the last column: nothing of it is read or written, without a branch around the
// accumulators. A row that does not exist gets z, da and prob of +0, from which every result is +0.
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
  static_assert(kBlockColumns == kProbChunkColumns, "a chunk of dprob's sum is a block of the staging");
  static_assert(3 * kStagingBlockBytes + kParked * 4 * 32 == staging_bytes(kConfig), "gate, up, a, and what waits");

  UNIEP_DEVICE SwigluGradientEpilogue(const GemmArguments& arguments, void* const* outputs, uint32_t staging)
      : arguments_(arguments), dz_(static_cast<BFloat16*>(outputs[0])), gate_(staging) {}

  // Between the K blocks of the next tile: 16 columns, z becomes dz in place.
  UNIEP_DEVICE void step(const WarpTile& /*next*/) {
    const uint32_t lane = ptx::lane_index();
    const uint32_t address = block_chunk(gate_, lane % 16, 2 * strip_ + lane / 16);
    uint32_t gate[4];
    uint32_t up[4];
    uint32_t a[4];
    ptx::copy_async_wait<0>();
    __syncwarp();
    ptx::load_matrix_x4(address, gate[0], gate[1], gate[2], gate[3]);
    ptx::load_matrix_x4(address + kStagingBlockBytes, up[0], up[1], up[2], up[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float prob = prob_[i % 2];
      const SwigluGradient low = swiglu_gradient(unpack_low(gate[i]), unpack_low(up[i]), prob, da_[2 * i]);
      const SwigluGradient high = swiglu_gradient(unpack_high(gate[i]), unpack_high(up[i]), prob, da_[2 * i + 1]);
      a[i] = pack_bfloat16(low.activation, high.activation);
      gate[i] = pack_bfloat16(low.gate, high.gate);
      up[i] = pack_bfloat16(low.up, high.up);
      prob_sum_[i % 2] = add_prob_term(prob_sum_[i % 2], da_[2 * i], low.unweighted);
      prob_sum_[i % 2] = add_prob_term(prob_sum_[i % 2], da_[2 * i + 1], high.unweighted);
    }
    ptx::store_matrix_x4(address, gate[0], gate[1], gate[2], gate[3]);
    ptx::store_matrix_x4(address + kStagingBlockBytes, up[0], up[1], up[2], up[3]);
    ptx::store_matrix_x4(address + 2 * kStagingBlockBytes, a[0], a[1], a[2], a[3]);
    ++strip_;
    // The next strip's values of da go to the front, where a rolled loop finds them. Only the current chunk's move: all
    // of them would cost a fifth of the arithmetic.
#pragma unroll
    for (int i = 0; i + kStripRegisters < kChunkRegisters; ++i) da_[i] = da_[i + kStripRegisters];
  }

  // After the strips of a chunk.
  UNIEP_DEVICE void end_group(const WarpTile& next) {
    __syncwarp();
    write();
    write_prob_sum();
    __syncwarp();
    column_ += kProbChunkColumns;
    const bool same_tile = ++chunk_ < kChunks;
    fetch(same_tile ? row_ : next.row, same_tile ? rows_ : next.rows, same_tile ? column_ : next.column);
    strip_ = 0;
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

 private:
  static constexpr int kRowsAtOnce = 4;  // eight lanes move a row's 128 bytes

  UNIEP_DEVICE static int32_t lane_row() {
    return static_cast<int32_t>(ptx::lane_index()) / 8;
  }
  UNIEP_DEVICE static int32_t lane_chunk() {
    return static_cast<int32_t>(ptx::lane_index()) % 8;
  }
  UNIEP_DEVICE static int32_t lane_column() {
    return lane_chunk() * kChunkColumns;
  }

  // The last few values wait in shared memory, for want of registers.
  UNIEP_DEVICE uint32_t parked() const {
    return gate_ + 3 * kStagingBlockBytes + ptx::lane_index() * 16;
  }
  UNIEP_DEVICE void unpark() {
    const ptx::Vector16 values = ptx::load_shared_16(parked());
#pragma unroll
    for (int i = 0; i < kParked; ++i) da_[kChunkRegisters - kParked + i] = float_from_bits(values.word[i]);
  }

  UNIEP_DEVICE void write() {
    if (lane_column() >= arguments_.n_extent - column_) return;
    BFloat16* dz = dz_ + (row_ + lane_row()) * arguments_.output_leading + column_ + lane_column();
    BFloat16* a =
        arguments_.activation + static_cast<int64_t>(row_ + lane_row()) * arguments_.n_extent + column_ + lane_column();
#pragma unroll 1
    for (int i = 0; i < kBlockRows; i += kRowsAtOnce) {
      const uint32_t address = block_chunk(gate_, lane_row() + i, lane_chunk());
      ptx::store_global_16(dz, ptx::load_shared_16(address));
      ptx::store_global_16(dz + arguments_.n_extent, ptx::load_shared_16(address + kStagingBlockBytes));
      ptx::store_global_16(a, ptx::load_shared_16(address + 2 * kStagingBlockBytes));
      dz += kRowsAtOnce * arguments_.output_leading;
      a += kRowsAtOnce * static_cast<int64_t>(arguments_.n_extent);
    }
  }

  UNIEP_DEVICE void fetch(int32_t row, int32_t rows, int32_t column) {
    const bool column_exists = lane_column() < arguments_.n_extent - column;
    const BFloat16* z = arguments_.saved + (row + lane_row()) * arguments_.output_leading + column + lane_column();
#pragma unroll 1
    for (int i = 0; i < kBlockRows; i += kRowsAtOnce) {
      const bool exists = column_exists && lane_row() + i < rows;
      const BFloat16* const source = exists ? z : arguments_.saved;
      const uint32_t address = block_chunk(gate_, lane_row() + i, lane_chunk());
      ptx::copy_async_16(address, source, exists);
      ptx::copy_async_16(address + kStagingBlockBytes, source + arguments_.n_extent, exists);
      z += kRowsAtOnce * arguments_.output_leading;
    }
    ptx::copy_async_commit();
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
  BFloat16* const dz_;
  const uint32_t gate_;  // the block of gate columns; up's and a's follow
  int32_t row_ = 0;
  int32_t column_ = WarpTile::kBeyond;  // of the chunk
  int32_t rows_ = 0;
  int32_t chunk_ = 0;
  int32_t strip_ = 0;
  float prob_[2] = {};
  float prob_sum_[2] = {};
  float da_[kHeld];
};

}  // namespace uniep::cuda
