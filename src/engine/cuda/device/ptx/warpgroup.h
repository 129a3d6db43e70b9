#pragma once

#include "engine/cuda/device/ptx/common.h"

namespace uniep::cuda::ptx {

constexpr uint32_t kThreadsPerWarp = 32;

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

// The same; true in all threads when `value` is true in all of them.
UNIEP_DEVICE bool named_barrier_all(uint32_t id, uint32_t threads, bool value) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.cta.red.and.aligned.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return all != 0;
}

}  // namespace uniep::cuda::ptx
