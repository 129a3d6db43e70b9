#pragma once

#include "engine/cuda/device/arguments/gemm_config.h"

// What the megakernel is compiled for. Shared by the host, which chooses it, and the device code.
namespace uniep::cuda {

enum class CombineKind : int {
  kEpilogue = 0,  // FC2 stores rows straight into the slots of their ranks
  kStaged = 1,    // FC2 stores them here, copies send them
  kGroups = 2,    // the same, summed by groups of experts before they are sent
};

// The GEMMs of a launch's kernel.
enum class LayerGemms : int {
  kForward = 0,         // FC1 with SwiGLU; FC2, whose rows go to their slots
  kFirstGradient = 1,   // dgrad FC2 with dSwiGLU
  kSecondGradient = 2,  // dgrad FC1, whose rows go to their slots
};

constexpr GemmConfig layer_gemm(LayerGemms gemms, GemmConfig gemm) {
  gemm.in_layer = true;
  gemm.layout = gemms == LayerGemms::kForward ? Layout::kForward : Layout::kDgrad;
  gemm.epilogue = gemms == LayerGemms::kFirstGradient ? Epilogue::kSwigluGradient : Epilogue::kLayer;
  return gemm;
}

// Weight gradients behind the tiles of dgrad FC1, in the same launch.
enum class FilledGradients : int { kNone = 0, kBFloat16 = 1, kFloat32 = 2, kAccumulate = 3 };

constexpr Epilogue epilogue_of(FilledGradients filled) {
  return filled == FilledGradients::kFloat32      ? Epilogue::kFloat32
         : filled == FilledGradients::kAccumulate ? Epilogue::kAccumulate
                                                  : Epilogue::kBFloat16;
}

struct LayerKernelConfig {
  LayerGemms gemms = LayerGemms::kForward;
  GemmConfig gemm = layer_gemm(LayerGemms::kForward, {});
  CombineKind combine = CombineKind::kEpilogue;
  bool on_sms = false;  // comm.where
  FilledGradients filled = FilledGradients::kNone;
};

// Whether a tile of FC1 is half gate and half up columns.
template <LayerKernelConfig kLayer>
constexpr bool kHasGateAndUp = (kLayer.gemms == LayerGemms::kForward) && (kLayer.gemm.expert.gated());

// The weight gradients' GEMMs, in the shared memory of dgrad FC1's.
constexpr GemmConfig filled_gemm(const LayerKernelConfig& config) {
  GemmConfig gemm = config.gemm;
  gemm.layout = Layout::kWgrad;
  gemm.epilogue = epilogue_of(config.filled);
  return gemm;
}

}  // namespace uniep::cuda
