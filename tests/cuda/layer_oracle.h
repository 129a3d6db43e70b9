#pragma once

#include "cli/layer_runner.h"
#include "tests/cuda/gpu_support.h"

namespace uniep::cuda::test {

// y and z of a global batch as one rank would make them, by the naive kernels on one GPU: the bytes that every run of
// the layer must give. It shares no kernel with the megakernel.
cli::LayerResult naive_layer(Kernels& kernels, const LayerConfig& config, const cli::LayerData& data);

}  // namespace uniep::cuda::test
