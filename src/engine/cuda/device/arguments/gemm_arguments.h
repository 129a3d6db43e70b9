#pragma once

#include "engine/cuda/device/arguments/gemm_config.h"
#include "engine/cuda/device/ptx/tensor_map.h"
#include "model/elementwise.h"

// A grouped GEMM kernel's arguments, laid out alike on the host and the device.
namespace uniep::cuda {

struct alignas(64) GemmArguments {
  TensorMap a;
  TensorMap z, dz;               // kSwigluGradient: [rows][2][I], in boxes of 16 rows, kTransferColumns, gate and up
  TensorMap recomputed;          // kSwigluGradient: a, [rows][I], the same
  const int32_t* segment_start;  // [experts], multiples of 128
  const int32_t* row_count;      // [experts], rows without padding
  int32_t experts;
  int32_t m_extent;           // wgrad: rows of an expert's output
  int32_t n_extent;           // columns of D; kSwiglu and kSwigluGradient: I
  int32_t k_extent;           // forward, dgrad: the length of the dot products
  int32_t raster;             // pairs of m blocks that share their n blocks' tiles of B in L2
  int32_t map_per_expert;     // B's maps: 0 = one map, the expert is its third coordinate
  int32_t output_per_expert;  // outputs[]: 0 = one address, experts follow at output_expert_stride
  int64_t output_leading;     // elements from one row of D to the next
  int64_t output_expert_stride;
  BFloat16* activation;    // kSwiglu: a [rows, I]
  const float* prob;       // [rows]
  const uint32_t* failed;  // or null; another word than 0: nothing is computed. Does not change while the kernel runs
  float* prob_chunks;      // kSwigluGradient: sums of 64 columns [ceil(I / 64)][prob_stride]
  int64_t prob_stride;
};
static_assert(sizeof(GemmArguments) % 64 == 0, "the maps that follow are aligned");

// output_maps() of the configuration are among kMaps.
template <int kMaps, int kOutputs>
struct alignas(64) GemmKernelArguments {
  GemmArguments common;
  TensorMap b[kMaps];       // B's, and behind them D's
  void* outputs[kOutputs];  // kSwiglu: z, may be null
};

}  // namespace uniep::cuda
