#pragma once

#include <cuda.h>

#include "engine/cuda/device/arguments/bias_arguments.h"
#include "engine/cuda/runtime/kernel.h"

namespace uniep::cuda {

KernelRequest bias_gradients_request();

// Of up to kMaxBiasExperts experts. The device's context must be current.
void launch_bias_gradients(KernelStore& kernels, const BiasArguments& arguments, CUstream stream);

}  // namespace uniep::cuda
