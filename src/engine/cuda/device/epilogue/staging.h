#pragma once

#include "engine/cuda/device/ptx/bfloat16_pair.h"
#include "engine/cuda/device/ptx/matrix.h"
#include "engine/cuda/device/ptx/memory.h"

// Blocks of 16 rows x 64 bf16 columns that belong to one warp, between the accumulators' layout (a thread holds two
// neighbouring columns) and 16-byte runs of global memory. 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that
// neither side has bank conflicts.
namespace uniep::cuda {

constexpr int kBlockRows = 16;
constexpr int kBlockColumns = 64;
constexpr int kChunkColumns = 8;  // bf16 values in 16 bytes
constexpr uint32_t kBlockRowBytes = 128;

// Where a block's rows go. `rows` of the warp's 16 exist; the others are written as zero or not at all.
struct BlockTarget {
  BFloat16* pointer;  // row 0, column 0
  int64_t leading;
  int32_t rows;
  int32_t columns;  // columns that exist, from the block's first; may be <= 0
};

UNIEP_DEVICE uint32_t block_chunk(uint32_t block, uint32_t row, uint32_t chunk) {
  return block + row * kBlockRowBytes + ((chunk ^ (row & 7u)) << 4);
}

// Accumulator layout, column groups 2 * pair and 2 * pair + 1 (8 columns each): m[0] and m[2] hold this thread's values
// of row lane / 4, m[1] and m[3] those 8 rows below.
UNIEP_DEVICE uint32_t fragment_address(uint32_t block, int32_t pair) {
  const uint32_t lane = ptx::lane_index();
  return block_chunk(block, (lane & 7u) + (lane & 8u), 2 * pair + (lane >> 4));
}

UNIEP_DEVICE void put_fragment(uint32_t block, int32_t pair, const uint32_t* m) {
  ptx::store_matrix_x4(fragment_address(block, pair), m[0], m[1], m[2], m[3]);
}

// 16 bytes of the target: row `row`, chunk `chunk`.
template <bool kZeroPadding>
UNIEP_DEVICE void write_chunk(ptx::Vector16 values, const BlockTarget& target, uint32_t row, uint32_t chunk) {
  const bool exists = static_cast<int32_t>(row) < target.rows;
  if constexpr (kZeroPadding) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values.word[i] = exists ? values.word[i] : 0;
  }
  if (kZeroPadding || exists) {
    ptx::store_global_16(target.pointer + row * target.leading + chunk * kChunkColumns, values);
  }
}

// Writes the block to global memory: four rows of 128 bytes at a time.
template <bool kZeroPadding>
UNIEP_DEVICE void write_block(uint32_t block, const BlockTarget& target) {
  const uint32_t lane = ptx::lane_index();
  const uint32_t chunk = lane % 8;
  if (static_cast<int32_t>(chunk * kChunkColumns) >= target.columns) return;
#pragma unroll
  for (uint32_t step = 0; step < kBlockRows / 4; ++step) {
    const uint32_t row = step * 4 + lane / 8;
    write_chunk<kZeroPadding>(ptx::load_shared_16(block_chunk(block, row, chunk)), target, row, chunk);
  }
}

// Strips of 16 rows x 16 columns: one ldmatrix or stmatrix, and one 16-byte access a lane.
constexpr int kStripColumns = 16;
constexpr uint32_t kStripBytes = kBlockRows * kStripColumns * 2;

UNIEP_DEVICE uint32_t strip_chunk(uint32_t strip, uint32_t row, uint32_t chunk) {
  return strip + row * 32 + ((chunk ^ (row >> 2 & 1u)) << 4);
}

UNIEP_DEVICE void put_strip(uint32_t strip, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  const uint32_t lane = ptx::lane_index();
  ptx::store_matrix_x4(strip_chunk(strip, (lane & 7u) + (lane & 8u), lane >> 4), m0, m1, m2, m3);
}

// This lane's 16 bytes of a strip: row lane / 2, chunk lane % 2; zero where the row does not exist.
UNIEP_DEVICE ptx::Vector16 zero_unless(ptx::Vector16 values, bool exists) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values.word[i] = exists ? values.word[i] : 0;
  return values;
}

UNIEP_DEVICE ptx::Vector16 strip_values(uint32_t strip, bool exists) {
  const uint32_t lane = ptx::lane_index();
  return zero_unless(ptx::load_shared_16(strip_chunk(strip, lane / 2, lane % 2)), exists);
}

// Moves register i + kBy to i: lets a rolled loop walk an array that must stay in registers. Rolled, because code that
// is longer than the instruction cache costs more than the moves.
template <int kBy, typename T, int kCount>
UNIEP_DEVICE void rotate_registers(T (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i + kBy < kCount; ++i) values[i] = values[i + kBy];
}

}  // namespace uniep::cuda
