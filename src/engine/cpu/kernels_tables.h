#pragma once

#include "engine/cpu/kernels.h"

namespace uniep::cpu {

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;    // kernels_avx2.cpp
extern const Kernels kAvx512Kernels;  // kernels_avx512.cpp

}  // namespace uniep::cpu
