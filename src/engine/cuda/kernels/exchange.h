#pragma once

#include <vector>

#include "engine/cuda/device/arguments/layer_launch.h"
#include "engine/cuda/runtime/run_time_compiler.h"
#include "program/kernel_memory.h"

// Dispatch and combine without the GEMMs between them: Programs of one launch, and the kernel that runs them
// (device/kernels/exchange.cu; its argument is a LayerLaunch, one CTA an SM, cooperative).
namespace uniep::cuda {

// How the warps of a CTA share the work: the last `reduce_warps` warps only sum. Every warp has a ring of `stages`
// chunks.
struct ExchangeConfig {
  int warps = kExchangeWarps;
  int reduce_warps = 0;
  int chunk_bytes = 4096;
  int stages = 3;
};

// What the kernel is compiled for: exactly the rings that a Schedule says. Throws Error (kInvalidArgument) where they
// do not fit.
ExchangeConfig dispatch_config(int chunk_bytes, int stages);
ExchangeConfig combine_config(int chunk_bytes, int stages);
// Of dispatch and of combine: resolve()'s, and those with a layer's rings.
std::vector<ExchangeConfig> default_exchange_configs();

int exchange_threads(const ExchangeConfig& config);
int exchange_shared_bytes(const ExchangeConfig& config);
KernelRequest exchange_request(const ExchangeConfig& config);

// What begins every call (device/kernels/begin_call.cu): its argument is the RankCalls' address, a CTA a rank.
KernelRequest begin_call_request();

}  // namespace uniep::cuda
