#include "engine/cuda/tensor_maps.h"

#include <cstring>
#include <string>

#include "engine/cuda/device/gemm_config.h"
#include "engine/cuda/driver.h"
#include "uniep/error.h"

namespace uniep::cuda {

namespace {

TensorMap encode(const MatrixView& view, const cuuint32_t (&box)[3], CUtensorMapSwizzle swizzle, const char* name) {
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap), "a tensor map has 128 bytes");
  if (view.address == nullptr || reinterpret_cast<uintptr_t>(view.address) % 16 != 0) {
    throw Error(Status::kInvalidArgument, std::string(name) + " must be a device address that is a multiple of 16");
  }
  CUtensorMap map;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(view.columns), static_cast<cuuint64_t>(view.rows),
                               static_cast<cuuint64_t>(view.depth)};
  const cuuint64_t strides[2] = {sizes[0] * 2, sizes[0] * sizes[1] * 2};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = driver().cuTensorMapEncodeTiled(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(view.address), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result, (std::string("describing ") + name + " [" + std::to_string(view.depth) + ", " +
                 std::to_string(view.rows) + ", " + std::to_string(view.columns) + "] to TMA")
                    .c_str());
  TensorMap copy;
  std::memcpy(&copy, &map, sizeof(copy));
  return copy;
}

}  // namespace

TensorMap encode_operand_map(const MatrixView& view, int box_rows, const char* name) {
  return encode(view, {64, static_cast<cuuint32_t>(box_rows), 1}, CU_TENSOR_MAP_SWIZZLE_128B, name);
}

TensorMap encode_transfer_map(const MatrixView& view, int box_depth, const char* name) {
  return encode(view, {kTransferColumns, 1, static_cast<cuuint32_t>(box_depth)}, CU_TENSOR_MAP_SWIZZLE_64B, name);
}

}  // namespace uniep::cuda
