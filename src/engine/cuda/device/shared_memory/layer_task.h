#pragma once

#include "model/portability.h"

namespace uniep::cuda {

// The megakernel's task record: a tile of a row GEMM, with all that the loader, the math warps and the signal warp need
// to know of it. Widths are multiples of 8 columns.
struct alignas(16) LayerTask {
  static constexpr uint8_t kEnd = 1;      // no more tasks
  static constexpr uint8_t kSharedB = 2;  // load half of B for both CTAs of the cluster
  static constexpr uint8_t kStore = 4;    // the tile exists: write it
  static constexpr uint8_t kSecond = 8;   // FC2, dgrad FC1; else FC1, dgrad FC2
  static constexpr uint8_t kWgrad = 16;   // dW1 with kSecond, else dW2
  static constexpr uint8_t kTurn = 32;    // no tile: the last one of dgrad FC2 is over, its z takes k_blocks stages

  int32_t row;             // the tile's first expert row; of a weight gradient: row of dW
  uint16_t m_block;        // weight gradient: the expert's first row / kRowAlignment
  uint16_t expert;         // local
  uint16_t column_eighth;  // first column: of I for the first GEMM, of H for the second
  uint16_t k_blocks;
  uint8_t columns_eighth;  // columns that exist, up to the end of the matrix or of the second GEMM's column chunk
  uint8_t chunk;           // the second GEMM's column chunk
  uint8_t valid_rows;      // rows of the tile that exist, 0 to 128
  uint8_t flags;

  UNIEP_HOST_DEVICE bool has(uint8_t flag) const { return (flags & flag) != 0; }
  UNIEP_HOST_DEVICE int32_t column() const { return column_eighth * 8; }
  UNIEP_HOST_DEVICE int32_t columns() const { return columns_eighth * 8; }
};
static_assert(sizeof(LayerTask) == 16, "a task travels as one 16-byte access");

}  // namespace uniep::cuda
