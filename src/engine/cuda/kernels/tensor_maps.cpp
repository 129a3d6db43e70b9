#include "engine/cuda/kernels/tensor_maps.h"

#include <cstring>
#include <string>

#include "engine/cuda/device/arguments/gemm_config.h"
#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep::cuda {

namespace {

// Three dimensions, the fastest first.
struct BoxedTensor {
  cuuint64_t sizes[3];
  cuuint64_t strides[2];  // bytes, of the second and third dimension
  cuuint32_t box[3];
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion promotion;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};

TensorMap encode(const void* address, const BoxedTensor& tensor, const char* name) {
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap), "a tensor map has 128 bytes");
  if (address == nullptr || reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    throw Error(Status::kInvalidArgument, std::string(name) + " must be a device address that is a multiple of 16");
  }
  CUtensorMap map;
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = driver().cuTensorMapEncodeTiled(
      &map, tensor.type, 3, const_cast<void*>(address), tensor.sizes, tensor.strides, tensor.box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, tensor.swizzle, tensor.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result, (std::string("describing ") + name + " to TMA, " + std::to_string(tensor.sizes[0]) + " columns, " +
                 std::to_string(tensor.sizes[1]) + " rows, " + std::to_string(tensor.sizes[2]) + " matrices")
                    .c_str());
  TensorMap copy;
  std::memcpy(&copy, &map, sizeof(copy));
  return copy;
}

}  // namespace

TensorMap encode_operand_map(const MatrixView& view, int box_rows, const char* name) {
  const auto columns = static_cast<cuuint64_t>(view.columns);
  const auto rows = static_cast<cuuint64_t>(view.rows);
  const cuuint64_t row_bytes = 2 * (view.row_stride != 0 ? static_cast<cuuint64_t>(view.row_stride) : columns);
  return encode(view.address,
                {{columns, rows, static_cast<cuuint64_t>(view.depth)},
                 {row_bytes, rows * row_bytes},
                 {64, static_cast<cuuint32_t>(box_rows), 1},
                 CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B},
                name);
}

TensorMap encode_transfer_map(const PartedRows& tensor, int box_rows, const char* name) {
  const auto length = static_cast<cuuint64_t>(tensor.columns);
  const auto count = static_cast<cuuint32_t>(tensor.parts);
  return encode(tensor.address,
                {{length, static_cast<cuuint64_t>(tensor.rows), count},
                 {count * length * 2, length * 2},
                 {kTransferColumns, static_cast<cuuint32_t>(box_rows), count},
                 CU_TENSOR_MAP_SWIZZLE_64B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_64B},
                name);
}

TensorMap encode_gradient_map(const MatrixView& view, int box_rows, const char* name) {
  const auto columns = static_cast<cuuint64_t>(view.columns);
  const auto rows = static_cast<cuuint64_t>(view.rows);
  return encode(view.address,
                {{columns, rows, static_cast<cuuint64_t>(view.depth)},
                 {columns * 4, rows * columns * 4},
                 {kLentColumns, static_cast<cuuint32_t>(box_rows), 1},
                 CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_DATA_TYPE_FLOAT32},
                name);
}

}  // namespace uniep::cuda
