#pragma once

#include "engine/cuda/device/ptx/tensor_map.h"

namespace uniep::cuda::test {

struct PtxArguments {
  TensorMap load;
  TensorMap store;
  const uint16_t* source;
  uint16_t* target;
  float* result;
  uint32_t* words;
};

}  // namespace uniep::cuda::test
