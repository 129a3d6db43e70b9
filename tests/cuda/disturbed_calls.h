#pragma once

#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/runtime/kernel_variant.h"
#include "uniep/uniep.h"

// Kernels with delays (engine/cuda/device/signals/disturbance.h), for layers and exchanges.
namespace uniep::cuda::test {

inline KernelVariant disturbed_kernels() {
  return {.name = "disturbed",
          .kernels = {"engine/cuda/device/kernels/megakernel.cu", "engine/cuda/device/kernels/exchange.cu"},
          .edits = {},
          .options = {"-DUNIEP_DISTURBED"}};
}

// A call's delays follow from its epoch. After a call of a group whose ranks are all in this process.
inline void disturb_calls(const Group& group, uint64_t seed) {
  constexpr uint32_t kSpread = 0x9e3779b1u;
  dynamic_cast<CudaEngine&>(group.implementation()).set_epoch(static_cast<uint32_t>(seed) * kSpread);
}

}  // namespace uniep::cuda::test
