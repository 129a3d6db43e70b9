#pragma once

#include "model/portability.h"

namespace uniep::cuda::test {

struct TrafficArguments {
  const void* source;
  void* target;
  int64_t vectors;  // of 16 bytes, in each
  uint64_t nanoseconds;
};

}  // namespace uniep::cuda::test
