#pragma once

#ifndef __CUDACC_RTC__
#include <cstdint>
#endif

namespace uniep {

// A bf16 value as its 16 bits, layout-compatible with every framework's bf16. Arithmetic happens in fp32.
struct BFloat16 {
  unsigned short bits;
};
static_assert(sizeof(BFloat16) == 2, "bf16 arrays are read as raw 16-bit words");

}  // namespace uniep
