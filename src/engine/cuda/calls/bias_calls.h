#pragma once

#include <cuda.h>

#include "engine/cuda/runtime/kernel.h"
#include "engine/engine.h"
#include "program/rank_program.h"

namespace uniep::cuda {

// What biases add to one rank's backward, in a kernel of their own: behind dgrad FC2, or later.
struct BiasLaunch {
  const RankProgram& program;
  const LayerConfig& config;
  const internal::PendingRank& operands;
  const WeightGradients* gradients = nullptr;  // null: none are made
  bool db1 = true, db2 = true;                 // of `gradients`
  const Weights* weights = nullptr;            // with b2, where it has a part in dprob; else null
  float* prob_chunks = nullptr;                // RankCall::prob_chunks, likewise
  int64_t prob_stride = 0;
  const uint32_t* failed = nullptr;  // GemmArguments::failed
  CUstream stream = nullptr;
};

// The device's context must be current.
void launch_biases(KernelStore& kernels, const BiasLaunch& launch);

}  // namespace uniep::cuda
