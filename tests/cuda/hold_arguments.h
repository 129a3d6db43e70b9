#pragma once

#include "model/portability.h"

namespace uniep::cuda::test {

struct HoldArguments {
  uint64_t* begun;  // of each CTA, by %globaltimer
  uint64_t nanoseconds;
};

}  // namespace uniep::cuda::test
