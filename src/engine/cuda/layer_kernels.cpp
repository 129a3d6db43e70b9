#include "engine/cuda/layer_kernels.h"

#include <string>

namespace uniep::cuda {

GemmConfig layer_config(int tile_n, int cluster, int stages) {
  GemmConfig config;
  config.layout = Layout::kForward;
  config.epilogue = Epilogue::kLayer;
  config.tile_n = tile_n;
  config.cluster = cluster;
  config.stages = stages == 0 ? largest_stages(config) : stages;
  return config;
}

std::vector<GemmConfig> default_layer_configs() {
  return {layer_config(256, 1), layer_config(256, 2), layer_config(128, 1), layer_config(128, 2)};
}

KernelRequest layer_request(const GemmConfig& config) {
  const auto macro = [](const char* name, int value) { return std::string(name) + "=" + std::to_string(value); };
  return {"engine/cuda/device/megakernel.cu",
          "uniep_layer",
          {macro("UNIEP_TILE_N", config.tile_n), macro("UNIEP_STAGES", config.stages),
           macro("UNIEP_CLUSTER", config.cluster)}};
}

}  // namespace uniep::cuda
