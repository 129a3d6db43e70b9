#pragma once

#include "model/portability.h"

// Shared memory that the cuda engine's kernels take, in bytes. One place for all who must agree: the rules of a
// Schedule and its filling, the host's launches, and the assertions in the kernels.
namespace uniep::cuda {

constexpr int kSharedMemoryLimit = 227 * 1024;  // of a CTA

constexpr int kTileM = 128;
constexpr int kTileK = 64;
constexpr int kMathWarpgroups = 2;
constexpr int kMathWarps = 4 * kMathWarpgroups;

// A stage of a GEMM's pipeline: a tile of A and one of B.
UNIEP_HOST_DEVICE constexpr int pipeline_stage_bytes(int tile_n) {
  return (kTileM + tile_n) * kTileK * 2;
}

// A copying warp's ring: chunks, and a note with each.
constexpr int kCopyNoteBytes = 16;
constexpr int kMaxCopyStages = 16;
UNIEP_HOST_DEVICE constexpr int copy_ring_bytes(int chunk_bytes, int stages) {
  return (chunk_bytes + kCopyNoteBytes) * stages;
}

constexpr int kStagingBlockBytes = 16 * 64 * 2;  // of a math warp: a block of 16 x 64 bf16 values
// Of a math warp that runs dSwiGLU: five blocks of 16 x kTransferColumns bf16 values, and one for four fp32 values a
// thread and its barriers.
constexpr int kTransferColumns = 32;  // that dSwiGLU moves at a time
constexpr int kGradientStagingBytes = 5 * 16 * kTransferColumns * 2 + 1024;
constexpr int kBarrierBytes = 1024;   // barriers and task records, and the alignment of the operands
constexpr int kCallBytes = 5 * 1024;  // the call, and what the roles share, where there is one

UNIEP_HOST_DEVICE constexpr int gemm_kernel_bytes(int tile_n, int stages, int staging_bytes, int ring_bytes,
                                                  int call_bytes) {
  const int bytes =
      stages * pipeline_stage_bytes(tile_n) + kMathWarps * staging_bytes + ring_bytes + kBarrierBytes + call_bytes;
  return (bytes + 1023) / 1024 * 1024;
}

// The kernels of forward, and of backward the one with dgrad FC1, which may run the weight gradients too; by
// comm.chunk_bytes and comm.stages.
UNIEP_HOST_DEVICE constexpr int layer_kernel_bytes(int tile_n, int stages, int chunk_bytes, int copy_stages) {
  return gemm_kernel_bytes(tile_n, stages, kStagingBlockBytes, copy_ring_bytes(chunk_bytes, copy_stages), kCallBytes);
}

// The kernel of backward with dgrad FC2.
UNIEP_HOST_DEVICE constexpr int gradient_kernel_bytes(int tile_n, int stages, int chunk_bytes, int copy_stages) {
  return gemm_kernel_bytes(tile_n, stages, kGradientStagingBytes, copy_ring_bytes(chunk_bytes, copy_stages),
                           kCallBytes);
}

// A weight gradient in a launch of its own. It copies nothing, but keeps the room of this ring free.
constexpr int kStandaloneChunkBytes = 4096;
constexpr int kStandaloneCopyStages = 3;
UNIEP_HOST_DEVICE constexpr int standalone_kernel_bytes(int tile_n, int stages) {
  return gemm_kernel_bytes(tile_n, stages, kStagingBlockBytes,
                           copy_ring_bytes(kStandaloneChunkBytes, kStandaloneCopyStages), 0);
}

// The kernel of dispatch or combine alone: every warp has a ring of its own.
constexpr int kExchangeWarps = 16;
constexpr int kMinCombineWarps = 4;
constexpr int kExchangeWarpBytes = 512;  // beside the chunks: barriers, the walk's state, alignment
UNIEP_HOST_DEVICE constexpr int exchange_kernel_bytes(int warps, int chunk_bytes, int stages) {
  return warps * (copy_ring_bytes(chunk_bytes, stages) + kExchangeWarpBytes) + kCallBytes;
}

// Long slices of a sum pay more than many warps: a combine has as many warps as its rings leave room for.
UNIEP_HOST_DEVICE constexpr int combine_warps(int chunk_bytes, int stages) {
  int warps = kExchangeWarps;
  while (warps > kMinCombineWarps && exchange_kernel_bytes(warps, chunk_bytes, stages) > kSharedMemoryLimit) --warps;
  return warps;
}

}  // namespace uniep::cuda
