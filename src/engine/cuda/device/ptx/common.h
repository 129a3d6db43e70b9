#pragma once

#include "model/portability.h"

#define UNIEP_DEVICE __device__ __forceinline__

namespace uniep::cuda::ptx {

// The 32-bit address of shared memory that PTX instructions take.
UNIEP_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

UNIEP_DEVICE uint32_t lane_index() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// The lanes below this one.
UNIEP_DEVICE uint32_t lanes_before() {
  return (1u << lane_index()) - 1;
}

UNIEP_DEVICE uint32_t nanoseconds_low() {
  uint32_t time;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(time));
  return time;
}

UNIEP_DEVICE uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// The value of lane 0, so that the compiler knows it to be the same in the whole warp.
UNIEP_DEVICE uint32_t warp_uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// The same for a value that loops and addresses depend on. It lands in a uniform register, and what follows from it
// stays in such: the compiler looks through a shuffle, and where it can not see why its value is uniform counts and
// addresses in vector registers.
UNIEP_DEVICE uint32_t uniform_register(uint32_t value) {
  return __reduce_or_sync(0xffffffffu, value);
}

// Read anew at each call, so that no register holds it in between.
UNIEP_DEVICE uint32_t thread_index() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The warp's number in its CTA, read anew likewise.
UNIEP_DEVICE uint32_t warp_index() {
  return warp_uniform(thread_index() / 32);
}

}  // namespace uniep::cuda::ptx
