#pragma once

#include <vector>

#include "engine/cuda/device/layer_launch.h"
#include "engine/cuda/gemm_kernels.h"

// The kernel that runs the forward layer's launches (device/megakernel.cu): kGemmThreads threads a CTA,
// shared_memory_bytes(config) of shared memory, cooperative, in clusters of config.cluster. Its argument is a
// LayerLaunch. Maps of B have boxes of tile_n / 2 rows.
namespace uniep::cuda {

// One tile for both GEMMs; `stages` 0 takes the most that fit. Checked by require_legal.
GemmConfig layer_config(int tile_n = 256, int cluster = 2, int stages = 0);

// The tiles that the library uses by default.
std::vector<GemmConfig> default_layer_configs();

KernelRequest layer_request(const GemmConfig& config);

}  // namespace uniep::cuda
