#pragma once

#include <vector>

#include "engine/cuda/device/arguments/layer_config.h"
#include "engine/cuda/device/arguments/layer_launch.h"
#include "engine/cuda/kernels/gemm_kernels.h"

// The kernel that runs the layer's launches (device/kernels/megakernel.cu): kGemmThreads threads a CTA,
// shared_memory_bytes(config.gemm) of shared memory, cooperative, in clusters of config.gemm.cluster. Its argument is a
// LayerLaunch. Maps of B have boxes of b_box_rows() rows.
namespace uniep::cuda {

// What of a Schedule is compiled into the kernel.
struct LayerKernelOptions {
  LayerGemms gemms = LayerGemms::kForward;
  int tile_n = 256;  // of all the kernel's GEMMs; with a gate FC1 has half of it of gate and up; dSwiGLU: 128 or 192
  int first_tile_n = 192;  // of kGradients: dSwiGLU's, and tile_n is the others'
  int cluster = 2;
  int pipeline_stages = 0;  // 0: the most that fit
  int ring_stage_bytes = 4096;
  int copy_stages = 3;  // of the copy warp's ring
  CombineKind combine = CombineKind::kEpilogue;
  bool on_sms = false;
  FilledGradients filled = FilledGradients::kNone;
  bool mixed = false;
  ExpertConfig expert = {};  // dgrad FC1's kernels ask only whether there is a gate
};

// Throws uniep::Error (kInvalidArgument) that names the rule that is broken.
LayerKernelConfig layer_config(const LayerKernelOptions& options);

// What the library uses by default, and the other kinds of copies and combines.
std::vector<LayerKernelConfig> default_layer_configs();

KernelRequest layer_request(const LayerKernelConfig& config);

// Rows of the boxes that B's maps move: weights are [N, K] in forward, [K, N] in backward.
int b_box_rows(const GemmConfig& config);

}  // namespace uniep::cuda
