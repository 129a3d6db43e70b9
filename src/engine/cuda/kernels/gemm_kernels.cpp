#include "engine/cuda/kernels/gemm_kernels.h"

#include <cstring>
#include <string>

#include "uniep/error.h"

namespace uniep::cuda {

GemmConfig default_config(Layout layout, Epilogue epilogue) {
  GemmConfig config;
  config.layout = layout;
  config.epilogue = epilogue;
  if (epilogue == Epilogue::kSwigluGradient)
    config.tile_n = 192;  // its deferred epilogue needs the registers of the rest
  config.pipeline_stages = largest_stages(config);
  return config;
}

std::vector<GemmConfig> default_configs() {
  return {
      default_config(Layout::kForward, Epilogue::kBFloat16), default_config(Layout::kForward, Epilogue::kSwiglu),
      default_config(Layout::kDgrad, Epilogue::kBFloat16),   default_config(Layout::kDgrad, Epilogue::kSwigluGradient),
      default_config(Layout::kWgrad, Epilogue::kBFloat16),   default_config(Layout::kWgrad, Epilogue::kFloat32),
      default_config(Layout::kWgrad, Epilogue::kAccumulate)};
}

int largest_stages(const GemmConfig& config) {
  GemmConfig trial = config;
  for (trial.pipeline_stages = 8; trial.pipeline_stages > 2; --trial.pipeline_stages) {
    if (shared_memory_bytes(trial) <= kSharedMemoryLimit) break;
  }
  return trial.pipeline_stages;
}

int fewest_stages(const GemmConfig& config) {
  return config.epilogue == Epilogue::kSwigluGradient ? config.tile_n / kProbColumns : 2;
}

void require_legal(const GemmConfig& config) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw Error(Status::kInvalidArgument, message);
  };
  const bool gradient = config.epilogue == Epilogue::kSwigluGradient;
  require(config.tile_n == 128 || config.tile_n == (gradient ? 192 : 256),
          "tile_n is " + std::to_string(config.tile_n) +
              (gradient ? ": with dSwiGLU it must be 128 or 192" : ": it must be 128 or 256"));
  require(config.cluster == 1 || config.cluster == 2,
          "cluster is " + std::to_string(config.cluster) + ": it must be 1 or 2");
  require(config.pipeline_stages >= fewest_stages(config) && shared_memory_bytes(config) <= kSharedMemoryLimit,
          "stages is " + std::to_string(config.pipeline_stages) + ": it must be " +
              std::to_string(fewest_stages(config)) + " to " + std::to_string(largest_stages(config)) +
              " for this tile");
}

int table_capacity(int count) {
  if (count <= 1) return 1;
  int capacity = 8;
  while (capacity < count) capacity *= 2;
  constexpr int kMaxTables = 224;  // 128 bytes each: a kernel takes 32,764 bytes of arguments
  if (count <= kMaxTables && capacity > kMaxTables) capacity = kMaxTables;
  if (capacity > kMaxTables) {
    throw Error(Status::kInvalidArgument, std::to_string(count) + " experts given by address: at most " +
                                              std::to_string(kMaxTables) + "; give one tensor instead");
  }
  return capacity;
}

KernelRequest gemm_request(const GemmConfig& config) {
  const auto macro = [](const char* name, int value) { return std::string(name) + "=" + std::to_string(value); };
  return {"engine/cuda/device/kernels/grouped_gemm.cu",
          "uniep_grouped_gemm",
          {macro("UNIEP_LAYOUT", static_cast<int>(config.layout)),
           macro("UNIEP_EPILOGUE", static_cast<int>(config.epilogue)), macro("UNIEP_TILE_N", config.tile_n),
           macro("UNIEP_STAGES", config.pipeline_stages), macro("UNIEP_CLUSTER", config.cluster),
           macro("UNIEP_MAPS", config.maps), macro("UNIEP_OUTPUTS", config.outputs)}};
}

KernelRequest prob_sum_request() {
  return {"engine/cuda/device/kernels/prob_sum.cu", "uniep_sum_prob_chunks", {}};
}

KernelRequest naive_request(const char* function) {
  return {"engine/cuda/device/kernels/naive_gemm.cu", function, {}};
}

ArgumentBlock argument_block(const GemmConfig& config, const GemmArguments& arguments,
                             const std::vector<TensorMap>& maps, const std::vector<void*>& outputs) {
  const size_t maps_at = sizeof(GemmArguments);
  const size_t outputs_at = maps_at + static_cast<size_t>(config.maps + output_maps(config)) * sizeof(TensorMap);
  ArgumentBlock block(outputs_at + static_cast<size_t>(config.outputs) * sizeof(void*));
  auto* const bytes = static_cast<unsigned char*>(block.data());
  std::memcpy(bytes, &arguments, sizeof(arguments));
  std::memcpy(bytes + maps_at, maps.data(), maps.size() * sizeof(TensorMap));
  std::memcpy(bytes + outputs_at, outputs.data(), outputs.size() * sizeof(void*));
  return block;
}

}  // namespace uniep::cuda
