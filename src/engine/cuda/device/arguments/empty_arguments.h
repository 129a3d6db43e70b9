#pragma once

#include "engine/cuda/device/arguments/signals.h"
#include "uniep/bfloat16.h"

// Arguments of empty_nan.cu: ranks that share a GPU.
namespace uniep::cuda {

constexpr int kEmptyThreads = 256;
constexpr int kEmptyBlocks = 64;  // a rank

struct EmptyArguments {
  struct Rank {
    const uint32_t* whole;  // PlacementTables
    BFloat16* y;
    int64_t count;  // elements
  };
  Rank rank[kMaxCudaRanks];
};

}  // namespace uniep::cuda
