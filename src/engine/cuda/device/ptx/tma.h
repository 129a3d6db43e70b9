#pragma once

#include "engine/cuda/device/ptx/common.h"
#include "engine/cuda/device/ptx/tensor_map.h"

// The tensor memory accelerator: boxes of 3-D tensors through a descriptor, and plain runs of bytes (bulk). Loads
// report to an mbarrier; stores belong to the issuing thread's bulk group. Coordinate 0 is the
// contiguous one. What lies outside the tensor is read as zero and not written.
namespace uniep::cuda::ptx {

UNIEP_DEVICE void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Before the first use of a map that lies in global memory and was written since the SM last saw it.
UNIEP_DEVICE void tma_acquire_map(const TensorMap& map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(&map) : "memory");
}

// Where a box begins.
struct BoxOrigin {
  int32_t c0, c1, c2;
};

UNIEP_DEVICE void tma_load_3d(uint32_t shared, const TensorMap& map, uint64_t& barrier, const BoxOrigin& at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at.c0), "r"(at.c1), "r"(at.c2)
      : "memory");
}

// The box lands at the same place in every CTA of `cta_mask`, and so does the report to the barrier.
UNIEP_DEVICE void tma_load_3d_multicast(uint32_t shared, const TensorMap& map, uint64_t& barrier, uint16_t cta_mask,
                                        const BoxOrigin& at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared),
      "l"(&map), "r"(shared_address(&barrier)), "h"(cta_mask), "r"(at.c0), "r"(at.c1), "r"(at.c2)
      : "memory");
}

UNIEP_DEVICE void tma_store_3d(const TensorMap& map, uint32_t shared, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

// Runs of bytes; addresses and length are multiples of 16.
UNIEP_DEVICE void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint64_t& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

UNIEP_DEVICE void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

UNIEP_DEVICE void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the sources of all but the newest groups have been read, so that shared memory may be written again.
template <int kGroupsLeft>
UNIEP_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroupsLeft) : "memory");
}

// Until all but the newest groups are complete in global memory: what a flag may announce.
template <int kGroupsLeft>
UNIEP_DEVICE void bulk_wait_complete() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

}  // namespace uniep::cuda::ptx
