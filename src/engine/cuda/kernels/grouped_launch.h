#pragma once

#include <cuda.h>

#include <vector>

#include "engine/cuda/kernels/gemm_kernels.h"
#include "engine/cuda/runtime/kernel.h"
#include "uniep/grouped_gemm.h"

// Launches of the grouped GEMM kernel (device/kernels/grouped_gemm.cu), for GroupedGemm and for the layer's weight
// gradients.
namespace uniep::cuda {

// Extents and rows; operands and outputs are the caller's to add.
GemmArguments grouped_arguments(const ExpertRows& rows, int n, int k);

// What a launch is given beside its arguments: maps of B, and where matrices of results begin.
struct GemmOperands {
  GemmArguments arguments;
  std::vector<TensorMap> maps;
  std::vector<void*> outputs;
};

// Where a launch runs.
struct GemmPlace {
  int sms = 0;  // CTAs, rounded down to whole clusters
  CUstream stream = nullptr;
};

// The device's context must be current.
void launch_grouped_gemm(KernelStore& kernels, const GemmConfig& config, const GemmOperands& operands,
                         const GemmPlace& place);

// dw[e][m, n] = a[rows of e, m]^T b[rows of e, n], as GroupedGemm::weight_gradient.
struct WeightGradientOperands {
  ExpertRows rows;
  const void* a = nullptr;
  const void* b = nullptr;
  int m = 0, n = 0;
  int a_stride = 0;  // elements from one row of a to the next; 0: m
  MutableExpertMatrices dw;
  const uint32_t* failed = nullptr;  // GemmArguments::failed
  int raster = 1;                    // GemmArguments::raster
};

Epilogue epilogue_of(WeightGradient gradient);

// For gradients by this many addresses; 0: as one tensor. More than fit into one launch take several.
int addresses_of_launch(int experts);

void launch_weight_gradient(KernelStore& kernels, GemmConfig config, const WeightGradientOperands& gemm,
                            const GemmPlace& place);

}  // namespace uniep::cuda
