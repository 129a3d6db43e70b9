#pragma once

#include "engine/cuda/device/arguments/rank_call.h"

// The argument of the layer's kernels. Virtual ranks share a launch: CTA b is CTA b % ctas of calls[b / ctas]. The
// first RankProgram::workers of these are the rank's workers. With slice_ns, where a device has one rank, lent workers
// leave that long after they have begun, and the further CTAs take their places in turn.
namespace uniep::cuda {

struct LayerLaunch {
  const RankCall* calls;  // in device memory
  int32_t launch;         // index into RankProgram::stages
  int32_t ctas;           // of a rank, a multiple of the cluster
  int64_t slice_ns = 0;   // 0: all workers stay to the end
};

}  // namespace uniep::cuda
