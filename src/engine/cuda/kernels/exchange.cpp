#include "engine/cuda/kernels/exchange.h"

#include <string>

#include "uniep/error.h"

namespace uniep::cuda {
namespace {

ExchangeConfig fitting(const ExchangeConfig& config) {
  if (exchange_shared_bytes(config) <= kSharedMemoryLimit) return config;
  throw Error(Status::kInvalidArgument, "comm.chunk_bytes with comm.stages: " + std::to_string(config.chunk_bytes) +
                                            " and " + std::to_string(config.stages) + " for each of " +
                                            std::to_string(config.warps) + " warps do not fit an SM's " +
                                            std::to_string(kSharedMemoryLimit) + " bytes of shared memory");
}

}  // namespace

ExchangeConfig dispatch_config(int chunk_bytes, int stages) {
  return fitting({.warps = kExchangeWarps, .reduce_warps = 0, .chunk_bytes = chunk_bytes, .stages = stages});
}

ExchangeConfig combine_config(int chunk_bytes, int stages) {
  return fitting(
      {.warps = combine_warps(chunk_bytes, stages), .reduce_warps = 2, .chunk_bytes = chunk_bytes, .stages = stages});
}

std::vector<ExchangeConfig> default_exchange_configs() {
  return {dispatch_config(4096, 3), combine_config(8192, 2), combine_config(4096, 3)};
}

int exchange_threads(const ExchangeConfig& config) {
  return 32 * config.warps;
}

int exchange_shared_bytes(const ExchangeConfig& config) {
  return exchange_kernel_bytes(config.warps, config.chunk_bytes, config.stages);
}

KernelRequest exchange_request(const ExchangeConfig& config) {
  const auto macro = [](const char* name, int value) { return std::string(name) + "=" + std::to_string(value); };
  return {"engine/cuda/device/kernels/exchange.cu",
          "uniep_exchange",
          {macro("UNIEP_WARPS", config.warps), macro("UNIEP_REDUCE_WARPS", config.reduce_warps),
           macro("UNIEP_CHUNK_BYTES", config.chunk_bytes), macro("UNIEP_COPY_STAGES", config.stages)}};
}

KernelRequest begin_call_request() {
  return {"engine/cuda/device/kernels/begin_call.cu", "uniep_begin_call", {}};
}

}  // namespace uniep::cuda
