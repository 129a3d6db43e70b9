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
  kGradients = 3,       // dgrad FC2, then dgrad FC1
};

constexpr bool has_first_gradient(LayerGemms gemms) {
  return gemms == LayerGemms::kFirstGradient || gemms == LayerGemms::kGradients;
}
constexpr bool has_second_gradient(LayerGemms gemms) {
  return gemms == LayerGemms::kSecondGradient || gemms == LayerGemms::kGradients;
}

// A kernel's GEMM; of kGradients dgrad FC1's.
constexpr GemmConfig layer_gemm(LayerGemms gemms, GemmConfig gemm) {
  gemm.in_layer = true;
  gemm.layout = gemms == LayerGemms::kForward ? Layout::kForward : Layout::kDgrad;
  gemm.epilogue = gemms == LayerGemms::kFirstGradient ? Epilogue::kSwigluGradient : Epilogue::kLayer;
  return gemm;
}

// dgrad FC2's GEMM in the kernel of kGradients whose dgrad FC1 is `second`.
constexpr GemmConfig first_gradient_gemm(GemmConfig second, int first_tile_n) {
  second.epilogue = Epilogue::kSwigluGradient;
  second.tile_n = first_tile_n;
  return second;
}

// dgrad FC1's GEMM of kGradients, with the memory that dgrad FC2 takes before it.
constexpr GemmConfig beside_first_gradient(GemmConfig second, int first_tile_n) {
  const int first_bytes = operand_bytes(first_gradient_gemm(second, first_tile_n)), bytes = operand_bytes(second);
  second.operand_bytes = first_bytes > bytes ? first_bytes : bytes;
  return second;
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
  bool mixed = false;    // weight gradients beside the dgrads, too (program/wgrad_queues.h)
  int first_tile_n = 0;  // of kGradients: columns of dgrad FC2's tile; `gemm` is dgrad FC1's

  constexpr bool operator==(const LayerKernelConfig&) const = default;
};

// The GEMM of dgrad FC2, in a kernel that has it. In kGradients it has the same stages, ring and memory as dgrad FC1's.
constexpr GemmConfig first_gemm(const LayerKernelConfig& config) {
  if (config.gemms != LayerGemms::kGradients) return config.gemm;
  return first_gradient_gemm(config.gemm, config.first_tile_n);
}

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
