#pragma once

#include "engine/cuda/device/gemm_config.h"

// What the megakernel is compiled for. Shared by the host, which chooses it, and the device code.
namespace uniep::cuda {

enum class CombineKind : int {
  kEpilogue = 0,  // FC2 stores rows straight into the slots of their ranks
  kStaged = 1,    // FC2 stores them here, copies send them
  kGroups = 2,    // the same, summed by groups of experts before they are sent
};

// The products of a launch's kernel.
enum class LayerProducts : int {
  kForward = 0,         // FC1 with SwiGLU; FC2, whose rows go to their slots
  kFirstGradient = 1,   // dgrad FC2 with dSwiGLU
  kSecondGradient = 2,  // dgrad FC1, whose rows go to their slots
};

constexpr GemmConfig layer_gemm(LayerProducts products, GemmConfig gemm) {
  gemm.in_layer = true;
  gemm.layout = products == LayerProducts::kForward ? Layout::kForward : Layout::kDgrad;
  gemm.epilogue = products == LayerProducts::kFirstGradient ? Epilogue::kSwigluGradient : Epilogue::kLayer;
  return gemm;
}

struct LayerKernelConfig {
  LayerProducts products = LayerProducts::kForward;
  GemmConfig gemm = layer_gemm(LayerProducts::kForward, {});
  CombineKind combine = CombineKind::kEpilogue;
  bool on_sms = false;  // comm.where
};

}  // namespace uniep::cuda
