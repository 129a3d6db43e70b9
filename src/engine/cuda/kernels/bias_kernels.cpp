#include "engine/cuda/kernels/bias_kernels.h"

namespace uniep::cuda {

KernelRequest bias_gradients_request() {
  return {"engine/cuda/device/kernels/bias_gradients.cu", "uniep_bias_gradients", {}};
}

void launch_bias_gradients(KernelStore& kernels, const BiasArguments& arguments, CUstream stream) {
  int ctas = arguments.dot_ctas;
  for (const BiasSum& sum : arguments.sums) ctas += (sum.columns + kBiasColumns - 1) / kBiasColumns;
  if (ctas == 0 || arguments.experts == 0) return;
  BiasArguments copy = arguments;
  launch_kernel(kernels.get(bias_gradients_request(), 0),
                {.grid_x = ctas, .grid_y = arguments.experts, .threads = kBiasThreads, .stream = stream}, &copy,
                "launching the gradients of biases");
}

}  // namespace uniep::cuda
