#pragma once

#include "engine/cuda/device/ptx/common.h"

namespace uniep::cuda::ptx {

constexpr uint32_t kThreadsPerWarp = 32;
constexpr uint32_t kThreadsPerWarpgroup = 128;

template <uint32_t kRegisters>
UNIEP_DEVICE void raise_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes multiples of 8");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
UNIEP_DEVICE void lower_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes multiples of 8");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier among `threads` threads of the CTA; `id` is a named constant of the kernel, 1 to 15.
UNIEP_DEVICE void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace uniep::cuda::ptx
