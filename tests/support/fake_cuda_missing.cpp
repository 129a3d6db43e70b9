// The driver's functions that the stand-in does not have: found, and not supported.
#include "engine/cuda/runtime/driver.h"

extern "C" CUresult fake_cuda_not_supported() {
  return CUDA_ERROR_NOT_SUPPORTED;
}

// Weak: those of fake_cuda.cpp come first.
#define TEXT_OF(name) #name
#define STAND_IN(name) __asm__(".weak " TEXT_OF(name) "\n.set " TEXT_OF(name) ", fake_cuda_not_supported");
UNIEP_DRIVER_FUNCTIONS(STAND_IN)
