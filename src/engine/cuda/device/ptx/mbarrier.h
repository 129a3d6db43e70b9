#pragma once

#include "engine/cuda/device/ptx/common.h"

// Shared-memory barriers (mbarrier). A phase ends when its arrivals and its announced bytes have all come.
namespace uniep::cuda::ptx {

UNIEP_DEVICE void mbarrier_init(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Before the barrier's memory is used for anything else.
UNIEP_DEVICE void mbarrier_invalidate(uint64_t& barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Makes freshly initialised barriers visible to the cluster and to bulk copies.
UNIEP_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

UNIEP_DEVICE void mbarrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives on the barrier at the same place in another CTA of the cluster. Orders no generic accesses of this thread: an
// explicit cluster scope would cost a GPU-wide memory barrier. Right after wgmma or TMA, whose waits order them.
UNIEP_DEVICE void mbarrier_arrive_remote(uint64_t& barrier, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(cta)
      : "memory");
}

// As many arrivals at once.
UNIEP_DEVICE void mbarrier_arrive_times(uint64_t& barrier, uint32_t times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(times) : "memory");
}

UNIEP_DEVICE void mbarrier_arrive_remote_times(uint64_t& barrier, uint32_t cta, uint32_t times) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(cta), "r"(times)
      : "memory");
}

UNIEP_DEVICE void mbarrier_arrive_expect_bytes(uint64_t& barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// The same for a barrier of any CTA of the cluster (see cluster_address), after all earlier accesses of this thread.
UNIEP_DEVICE void mbarrier_arrive_expect_bytes_remote(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Does not wait at all, where try_wait may for a while.
UNIEP_DEVICE bool mbarrier_test_wait(uint64_t& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

UNIEP_DEVICE bool mbarrier_try_wait(uint64_t& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for the end of the phase of the given parity. `name` says in a debug build which wait ran out of time.
UNIEP_DEVICE void mbarrier_wait(uint64_t& barrier, uint32_t parity, [[maybe_unused]] const char* name) {
#ifdef UNIEP_BOUNDED_WAITS
  constexpr uint32_t kLimitNanoseconds = 2'000'000'000;
  const uint32_t begin = nanoseconds_low();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (nanoseconds_low() - begin > kLimitNanoseconds) {
      printf("uniep: wait for '%s' ran out: block %d thread %d parity %u\n", name, static_cast<int>(blockIdx.x),
             static_cast<int>(threadIdx.x), parity);
      __trap();
    }
  }
#else
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

}  // namespace uniep::cuda::ptx
