#pragma once

#include "cli/layer_runner.h"
#include "tests/cuda/gpu_support.h"

namespace uniep::cuda::test {

// y and z of a global batch as one rank would make them, by the naive kernels on one GPU: the bytes that every run of
// the layer must give. It shares no kernel with the megakernel. With `main_grad`, what gradients in fp32 hold before by
// flat element index, also dx, dprobs, dw1 and dw2.
cli::LayerResult naive_layer(Kernels& kernels, const LayerConfig& config, const cli::LayerData& data,
                             float (*main_grad)(uint64_t index) = nullptr);

// Its own kernels, to be compiled ahead.
std::vector<KernelRequest> oracle_kernels(const std::string& folder);

}  // namespace uniep::cuda::test
