#pragma once

#include "model/portability.h"

namespace uniep::cuda {

// The 128 bytes that cuTensorMapEncodeTiled fills.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
static_assert(sizeof(TensorMap) == 128, "a tensor map has 128 bytes");

}  // namespace uniep::cuda
