#pragma once

#include "engine/cuda/device/ptx/common.h"

namespace uniep::cuda::ptx {

UNIEP_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where another CTA of the cluster has what lies at `shared` in this one.
UNIEP_DEVICE uint32_t cluster_address(uint32_t shared, uint32_t cta) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(cta));
  return address;
}

// All threads of all CTAs of the cluster; shared-memory writes before it are seen after it.
UNIEP_DEVICE void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

}  // namespace uniep::cuda::ptx
