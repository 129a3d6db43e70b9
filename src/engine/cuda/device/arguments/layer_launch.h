#pragma once

#include "engine/cuda/device/arguments/rank_call.h"

// The argument of the layer's kernels. Virtual ranks share a launch: CTA b is worker b % workers of calls[b / workers].
namespace uniep::cuda {

struct LayerLaunch {
  const RankCall* calls;  // in device memory
  int32_t launch;         // index into RankProgram::stages
  int32_t workers;        // CTAs a rank, a multiple of the cluster
};

}  // namespace uniep::cuda
