#pragma once

#include <string>
#include <vector>

#include "tests/cuda/layer_cases.h"

// The small layers by which faults of kernels are found: one on four ranks, in as few ways as the kernels need.
namespace uniep::cuda::test {

struct MutantLayer {
  LayerConfig config;
  LayerCase how;
  bool dispatch_alone = false;  // how.schedule's dispatch()
};

const std::vector<std::string>& mutant_layer_names();
// Throws uniep::Error (kInvalidArgument) where there is none of the name.
MutantLayer mutant_layer(const std::string& name);

std::vector<KernelRequest> kernels_of(const MutantLayer& layer);

// Batches of one size with different routings and values, so that what a call before has left is wrong.
cli::LayerData mutant_batch(const MutantLayer& layer, uint64_t seed);

}  // namespace uniep::cuda::test
