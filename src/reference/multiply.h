#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/parallel.h"

namespace uniep::reference {

inline constexpr int64_t kTile = 4;     // rows and columns that are summed in registers
inline constexpr int64_t kBlock = 64;   // rows and columns of one task
inline constexpr int64_t kDepth = 256;  // how much of the inner dimension is packed at a time
static_assert(kBlock % kTile == 0, "a block is a whole number of tiles");

// sums[r][c] += left[k][r] * right[k][c] for k ascending: one chain per element, so blocking changes no bit.
inline void accumulate_tile(const double* left, const double* right, int64_t depth, double* sums) {
  double sum[kTile][kTile];
  for (int64_t r = 0; r < kTile; ++r) {
    for (int64_t c = 0; c < kTile; ++c) sum[r][c] = sums[r * kBlock + c];
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t r = 0; r < kTile; ++r) {
      for (int64_t c = 0; c < kTile; ++c) sum[r][c] += left[k * kTile + r] * right[k * kTile + c];
    }
  }
  for (int64_t r = 0; r < kTile; ++r) {
    for (int64_t c = 0; c < kTile; ++c) sums[r * kBlock + c] = sum[r][c];
  }
}

// Packs value(i, k) for `count` outer indices as [tile of i][k][i in the tile]; missing indices of the last tile are 0.
template <typename Value>
void pack(int64_t count, int64_t depth, const Value& value, double* packed) {
  for (int64_t tile = 0; tile < count; tile += kTile) {
    const int64_t valid = std::min(kTile, count - tile);
    double* target = packed + tile * depth;
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t i = 0; i < kTile; ++i) target[k * kTile + i] = i < valid ? value(tile + i, k) : 0.0;
    }
  }
}

struct MatrixSizes {
  int64_t rows, columns, depth;
};

// out[i, j] = sum over k of left(i, k) * right(k, j) in float64, k ascending from zero; out is [rows, columns].
template <typename Left, typename Right>
void multiply(const MatrixSizes& sizes, const Left& left, const Right& right, double* out) {
  const int64_t rows = sizes.rows, columns = sizes.columns, depth = sizes.depth;
  const int64_t row_blocks = (rows + kBlock - 1) / kBlock;
  const int64_t column_blocks = (columns + kBlock - 1) / kBlock;
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth);
  parallel_for(row_blocks * column_blocks, flops, [&](int64_t task) {
    const int64_t row = task / column_blocks * kBlock;
    const int64_t column = task % column_blocks * kBlock;
    const int64_t block_rows = std::min(kBlock, rows - row);
    const int64_t block_columns = std::min(kBlock, columns - column);
    std::vector<double> left_packed(kBlock * std::min(kDepth, depth));
    std::vector<double> right_packed(kBlock * std::min(kDepth, depth));
    std::vector<double> sums(kBlock * kBlock, 0.0);
    for (int64_t begin = 0; begin < depth; begin += kDepth) {
      const int64_t part = std::min(kDepth, depth - begin);
      pack(
          block_rows, part, [&](int64_t i, int64_t k) { return left(row + i, begin + k); }, left_packed.data());
      pack(
          block_columns, part, [&](int64_t j, int64_t k) { return right(begin + k, column + j); }, right_packed.data());
      for (int64_t i = 0; i < block_rows; i += kTile) {
        for (int64_t j = 0; j < block_columns; j += kTile) {
          accumulate_tile(&left_packed[i * part], &right_packed[j * part], part, &sums[i * kBlock + j]);
        }
      }
    }
    for (int64_t i = 0; i < block_rows; ++i) {
      std::copy_n(&sums[i * kBlock], block_columns, out + (row + i) * columns + column);
    }
  });
}

}  // namespace uniep::reference
