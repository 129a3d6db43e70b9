#pragma once

#include "engine/cuda/device/gemm_config.h"

// What the megakernel is compiled for. Shared by the host, which chooses it, and the device code.
namespace uniep::cuda {

enum class CombineKind : int {
  kEpilogue = 0,  // FC2 stores rows straight into the slots of their ranks
  kStaged = 1,    // FC2 stores them here, copies send them
  kGroups = 2,    // the same, summed by groups of experts before they are sent
};

struct LayerKernelConfig {
  GemmConfig gemm{.epilogue = Epilogue::kLayer};
  CombineKind combine = CombineKind::kEpilogue;
  bool on_sms = false;  // comm.where
};

}  // namespace uniep::cuda
