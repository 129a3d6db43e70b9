#pragma once

#include "model/portability.h"

namespace uniep::cuda {

struct ProbSumArguments {
  const float* chunks;  // [chunk_count][stride]
  int64_t stride;
  int64_t rows;
  float* dprob;  // [rows]
  int32_t chunk_count;
};

}  // namespace uniep::cuda
