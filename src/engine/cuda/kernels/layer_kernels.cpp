#include "engine/cuda/kernels/layer_kernels.h"

#include <algorithm>
#include <string>

namespace uniep::cuda {

namespace {

// It only matters how long K is: one kernel for all with a gate, and one for those without.
ExpertConfig of_dgrad_fc1(const ExpertConfig& expert) {
  ExpertConfig config;
  if (!expert.gated()) config.activation = ActivationKind::kRelu2;
  return config;
}

}  // namespace

LayerKernelConfig layer_config(const LayerKernelOptions& options) {
  LayerKernelConfig config;
  config.gemms = options.gemms;
  config.combine = options.combine;
  config.on_sms = options.on_sms;
  config.filled = options.filled;
  config.mixed = options.mixed;
  GemmConfig& gemm = config.gemm;
  gemm = layer_gemm(options.gemms, {});
  gemm.tile_n = options.tile_n;
  gemm.cluster = options.cluster;
  gemm.ring_stage_bytes = options.ring_stage_bytes;
  gemm.copy_stages = options.copy_stages;
  gemm.expert = options.gemms == LayerGemms::kSecondGradient ? of_dgrad_fc1(options.expert) : options.expert;
  gemm.pipeline_stages = options.pipeline_stages == 0 ? largest_stages(gemm) : options.pipeline_stages;
  if (options.gemms == LayerGemms::kGradients) {
    config.first_tile_n = options.first_tile_n;
    if (options.pipeline_stages == 0) {
      gemm.pipeline_stages = std::min(gemm.pipeline_stages, largest_stages(first_gemm(config)));
    }
    require_legal(first_gemm(config));
  }
  require_legal(gemm);
  if (options.gemms == LayerGemms::kGradients) gemm = beside_first_gradient(gemm, options.first_tile_n);
  return config;
}

std::vector<LayerKernelConfig> default_layer_configs() {
  std::vector<LayerKernelConfig> configs = {layer_config({}),
                                            layer_config({.cluster = 1}),
                                            layer_config({.tile_n = 128}),
                                            layer_config({.combine = CombineKind::kStaged}),
                                            layer_config({.combine = CombineKind::kGroups}),
                                            layer_config({.on_sms = true}),
                                            layer_config({.combine = CombineKind::kStaged, .on_sms = true})};
  constexpr int kGradientColumns = 192;
  for (const bool on_sms : {false, true}) {
    configs.push_back(
        layer_config({.gemms = LayerGemms::kFirstGradient, .tile_n = kGradientColumns, .on_sms = on_sms}));
  }
  for (const CombineKind combine : {CombineKind::kEpilogue, CombineKind::kStaged, CombineKind::kGroups}) {
    configs.push_back(layer_config({.gemms = LayerGemms::kSecondGradient, .combine = combine}));
  }
  for (const FilledGradients filled :
       {FilledGradients::kBFloat16, FilledGradients::kFloat32, FilledGradients::kAccumulate}) {
    configs.push_back(layer_config({.gemms = LayerGemms::kSecondGradient, .filled = filled}));
  }
  for (const FilledGradients filled : {FilledGradients::kBFloat16, FilledGradients::kAccumulate}) {
    configs.push_back(layer_config({.gemms = LayerGemms::kGradients, .filled = filled}));
  }
  for (const FilledGradients filled : {FilledGradients::kBFloat16, FilledGradients::kAccumulate}) {
    configs.push_back(layer_config({.gemms = LayerGemms::kGradients, .filled = filled, .mixed = true}));
  }
  configs.push_back(layer_config({.gemms = LayerGemms::kGradients,
                                  .combine = CombineKind::kGroups,
                                  .on_sms = true,
                                  .filled = FilledGradients::kBFloat16}));
  return configs;
}

KernelRequest layer_request(const LayerKernelConfig& config) {
  const ExpertConfig& expert = config.gemm.expert;
  const auto bits = [](const char* name, uint32_t value) {
    return std::string(name) + "=" + std::to_string(value) + "u";
  };
  const auto macro = [](const char* name, int value) { return std::string(name) + "=" + std::to_string(value); };
  return {
      "engine/cuda/device/kernels/megakernel.cu",
      "uniep_layer",
      {macro("UNIEP_GEMMS", static_cast<int>(config.gemms)), macro("UNIEP_TILE_N", config.gemm.tile_n),
       macro("UNIEP_FIRST_TILE_N", config.first_tile_n), macro("UNIEP_STAGES", config.gemm.pipeline_stages),
       macro("UNIEP_CLUSTER", config.gemm.cluster), macro("UNIEP_COPY_CHUNK_BYTES", config.gemm.ring_stage_bytes),
       macro("UNIEP_COPY_STAGES", config.gemm.copy_stages), macro("UNIEP_COMBINE", static_cast<int>(config.combine)),
       macro("UNIEP_ON_SMS", config.on_sms ? 1 : 0), macro("UNIEP_FILLED", static_cast<int>(config.filled)),
       macro("UNIEP_MIXED", config.mixed ? 1 : 0), macro("UNIEP_ACTIVATION", static_cast<int>(expert.activation)),
       macro("UNIEP_WEIGHS_Z", expert.weighs_z ? 1 : 0), macro("UNIEP_WEIGHS_OUTPUT", expert.weighs_output ? 1 : 0),
       macro("UNIEP_BIAS", expert.bias ? 1 : 0), bits("UNIEP_ALPHA", expert.alpha),
       bits("UNIEP_GATE_LIMIT", expert.gate_limit), bits("UNIEP_UP_LIMIT", expert.up_limit),
       bits("UNIEP_UP_OFFSET", expert.up_offset)}};
}

int b_box_rows(const GemmConfig& config) {
  if (config.layout == Layout::kForward) return config.tile_n / 2;
  return split_b_along_k(config) ? kTileK / 2 : kTileK;
}

}  // namespace uniep::cuda
