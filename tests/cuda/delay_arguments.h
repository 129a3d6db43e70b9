#pragma once

#include "model/portability.h"

namespace uniep::cuda::test {

struct DelayArguments {
  uint64_t nanoseconds;
};

}  // namespace uniep::cuda::test
