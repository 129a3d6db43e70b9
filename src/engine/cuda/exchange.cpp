#include "engine/cuda/exchange.h"

#include <algorithm>
#include <string>

#include "engine/cuda/device/gemm_config.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

constexpr int kBytesBesideChunks = 512;  // of a warp: barriers, the walk's state, alignment
constexpr int kCommonBytes = sizeof(RankCall) + 256;
constexpr int kMostStages = 32;
constexpr int kFewestCombineWarps = 4;

// The most stages that fit, up to those asked for.
int fitting_stages(ExchangeConfig config, int stages) {
  config.stages = std::clamp(stages, 1, kMostStages);
  while (config.stages > 0 && exchange_shared_bytes(config) > kSharedMemoryLimit) --config.stages;
  if (config.stages > 0) return config.stages;
  throw Error(Status::kInvalidArgument, "comm.chunk_bytes: " + std::to_string(config.chunk_bytes) + " for each of " +
                                            std::to_string(config.warps) + " warps do not fit an SM's " +
                                            std::to_string(kSharedMemoryLimit) + " bytes of shared memory");
}

}  // namespace

ExchangeConfig dispatch_config(int chunk_bytes, int stages) {
  ExchangeConfig config{.warps = 16, .reduce_warps = 0, .team_warps = 1, .chunk_bytes = chunk_bytes};
  config.stages = fitting_stages(config, stages);
  return config;
}

ExchangeConfig combine_config(int chunk_bytes, int stages) {
  ExchangeConfig config{.warps = 16, .reduce_warps = 2, .team_warps = 1, .chunk_bytes = chunk_bytes};
  // Long slices pay more than many warps, as long as one is on its way while another is added.
  config.stages = std::min(stages, 2);
  while (config.warps > kFewestCombineWarps && exchange_shared_bytes(config) > kSharedMemoryLimit) --config.warps;
  config.stages = fitting_stages(config, stages);
  return config;
}

std::vector<ExchangeConfig> default_exchange_configs() {
  return {dispatch_config(4096, 3), combine_config(4096, 3)};
}

int exchange_threads(const ExchangeConfig& config) {
  return 32 * config.warps;
}

int exchange_shared_bytes(const ExchangeConfig& config) {
  return config.warps * ((config.chunk_bytes + kCopyNoteBytes) * config.stages + kBytesBesideChunks) + kCommonBytes;
}

KernelRequest exchange_request(const ExchangeConfig& config) {
  const auto macro = [](const char* name, int value) { return std::string(name) + "=" + std::to_string(value); };
  return {"engine/cuda/device/exchange.cu",
          "uniep_exchange",
          {macro("UNIEP_WARPS", config.warps), macro("UNIEP_REDUCE_WARPS", config.reduce_warps),
           macro("UNIEP_TEAM_WARPS", config.team_warps), macro("UNIEP_CHUNK_BYTES", config.chunk_bytes),
           macro("UNIEP_COPY_STAGES", config.stages), macro("UNIEP_SHARED_BYTES", exchange_shared_bytes(config))}};
}

KernelRequest begin_call_request() {
  return {"engine/cuda/device/begin_call.cu", "uniep_begin_call", {}};
}

}  // namespace uniep::cuda
