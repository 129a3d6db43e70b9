#pragma once

#include <cuda.h>

#include "uniep/group.h"

namespace uniep::cuda {

inline CUstream stream_of(Stream stream) {
  return static_cast<CUstream>(stream.handle);
}

}  // namespace uniep::cuda
