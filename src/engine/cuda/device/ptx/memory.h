#pragma once

#include "engine/cuda/device/ptx/common.h"

// Loads, stores, fences and flags. Flags between CTAs of one GPU use gpu scope, flags between ranks system scope.
namespace uniep::cuda::ptx {

struct alignas(16) Vector16 {
  uint32_t word[4];
};

UNIEP_DEVICE Vector16 load_shared_16(uint32_t address) {
  Vector16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(address)
               : "memory");
  return v;
}

UNIEP_DEVICE uint32_t load_shared_4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
UNIEP_DEVICE void load_shared_8(uint32_t address, uint32_t& low, uint32_t& high) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(address) : "memory");
}

UNIEP_DEVICE void store_shared_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
UNIEP_DEVICE void store_shared_8(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

UNIEP_DEVICE void store_shared_16(uint32_t address, const Vector16& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// Into shared memory of any CTA of the cluster (see cluster_address); reports its 16 bytes to a barrier there.
UNIEP_DEVICE void store_async_16(uint32_t address, const Vector16& v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"(barrier)
      : "memory");
}

UNIEP_DEVICE Vector16 load_global_16(const void* pointer) {
  Vector16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(pointer)
               : "memory");
  return v;
}

UNIEP_DEVICE void store_global_16(void* pointer, const Vector16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// For data that is read once: leaves nothing behind in L1.
UNIEP_DEVICE Vector16 load_global_16_once(const void* pointer) {
  Vector16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(pointer)
               : "memory");
  return v;
}

// Without a branch, which would make the compiler doubt that the warp stays together.
UNIEP_DEVICE void store_global_float_if(bool condition, float* pointer, float value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p st.global.f32 [%1], %2;\n"
      "}\n" ::"r"(static_cast<uint32_t>(condition)),
      "l"(pointer), "f"(value)
      : "memory");
}

// Copies 16 bytes from global to shared memory in the background; writes zeros when `valid` is false.
UNIEP_DEVICE void copy_async_16(uint32_t shared, const void* global, bool valid) {
  const uint32_t source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}

UNIEP_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kGroupsLeft>
UNIEP_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

// Orders generic accesses to shared memory before later accesses by TMA or wgmma.
UNIEP_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders generic accesses to global memory before later accesses by TMA.
UNIEP_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

UNIEP_DEVICE void fence_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
UNIEP_DEVICE void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Polls: no order with other accesses.
UNIEP_DEVICE uint32_t load_relaxed_gpu(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

UNIEP_DEVICE uint32_t load_acquire_gpu(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

UNIEP_DEVICE uint32_t load_acquire_system(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

// Each word by itself; the address is a multiple of 16.
UNIEP_DEVICE Vector16 load_acquire_system_16(const void* pointer) {
  Vector16 v;
  asm volatile("ld.acquire.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(pointer)
               : "memory");
  return v;
}

UNIEP_DEVICE void store_release_system(uint32_t* pointer, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

UNIEP_DEVICE void add_release_gpu(uint32_t* pointer, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Behind a fence that releases what came before.
UNIEP_DEVICE void add_relaxed_gpu(uint32_t* pointer, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Returns the value before.
UNIEP_DEVICE uint32_t add_acquire_release_gpu(uint32_t* pointer, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(pointer), "r"(value) : "memory");
  return before;
}

}  // namespace uniep::cuda::ptx
