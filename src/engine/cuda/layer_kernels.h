#pragma once

#include <vector>

#include "engine/cuda/device/layer_config.h"
#include "engine/cuda/device/layer_launch.h"
#include "engine/cuda/gemm_kernels.h"

// The kernel that runs the forward layer's launches (device/megakernel.cu): kGemmThreads threads a CTA,
// shared_memory_bytes(config.gemm) of shared memory, cooperative, in clusters of config.gemm.cluster. Its argument is a
// LayerLaunch. Maps of B have boxes of tile_n / 2 rows.
namespace uniep::cuda {

// What of a Schedule is compiled into the kernel.
struct LayerKernelOptions {
  int tile_n = 256;  // of both GEMMs; 256: 128 gate and 128 up columns in FC1
  int cluster = 2;
  int stages = 0;  // 0: the most that fit
  int copy_chunk_bytes = 4096;
  int copy_stages = 3;  // of the copy warp's ring
  CombineKind combine = CombineKind::kEpilogue;
  bool on_sms = false;
};

// Throws uniep::Error (kInvalidArgument) that names the rule that is broken.
LayerKernelConfig layer_config(const LayerKernelOptions& options);

// What the library uses by default, and the other kinds of copies and combines.
std::vector<LayerKernelConfig> default_layer_configs();

KernelRequest layer_request(const LayerKernelConfig& config);

}  // namespace uniep::cuda
