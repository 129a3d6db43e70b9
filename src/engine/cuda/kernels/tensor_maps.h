#pragma once

#include <cstdint>

#include "engine/cuda/device/ptx/tensor_map.h"

namespace uniep::cuda {

// A row-major bf16 tensor [depth][rows][columns] and the box that TMA moves: `box_rows` rows of 64 columns with the
// 128-byte swizzle. What lies outside a matrix of the tensor is read as zero.
struct MatrixView {
  const void* address = nullptr;
  int64_t columns = 0;
  int64_t rows = 0;
  int64_t depth = 1;
  int64_t row_stride = 0;  // elements; 0: `columns`
};

TensorMap encode_operand_map(const MatrixView& view, int box_rows, const char* name);

// A bf16 tensor [rows][parts][columns] and boxes of kTransferColumns of `box_rows` rows of all parts, a part after the
// other, with the 64-byte swizzle. L2 fetches no more of a row than the box has: the rest would be gone before it is
// asked for.
struct PartedRows {
  const void* address;
  int64_t rows;
  int parts;
  int64_t columns;  // of a part
};
TensorMap encode_transfer_map(const PartedRows& tensor, int box_rows, const char* name);

// fp32 weight gradients [depth][rows][columns] in boxes of `box_rows` rows of kLentColumns, with the 128-byte swizzle.
TensorMap encode_gradient_map(const MatrixView& view, int box_rows, const char* name);

}  // namespace uniep::cuda
