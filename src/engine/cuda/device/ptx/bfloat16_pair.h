#pragma once

#include "engine/cuda/device/ptx/common.h"
#include "model/elementwise.h"

// Two bf16 values in a register, and their fp32 values.
namespace uniep::cuda {

UNIEP_DEVICE uint32_t pack_bfloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
UNIEP_DEVICE float unpack_low(uint32_t packed) {
  return float_from_bits(packed << 16);
}
UNIEP_DEVICE float unpack_high(uint32_t packed) {
  return float_from_bits(packed & 0xffff0000u);
}

}  // namespace uniep::cuda
