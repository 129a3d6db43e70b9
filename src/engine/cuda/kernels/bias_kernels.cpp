#include "engine/cuda/kernels/bias_kernels.h"

#include "model/bias_sums.h"

namespace uniep::cuda {

KernelRequest bias_gradients_request() {
  return {"engine/cuda/device/kernels/bias_gradients.cu", "uniep_bias_gradients", {}};
}

void launch_bias_gradients(KernelStore& kernels, const BiasArguments& arguments, CUstream stream) {
  int ctas = 0;
  for (const BiasSum& sum : arguments.sums) ctas += (sum.columns + kBiasDotColumns - 1) / kBiasDotColumns;
  if (ctas == 0 || arguments.experts == 0) return;
  BiasArguments copy = arguments;
  launch_kernel(kernels.get(bias_gradients_request(), 0),
                {.grid_x = ctas, .grid_y = arguments.experts, .threads = kBiasThreads, .stream = stream}, &copy,
                "launching the gradients of biases");
}

}  // namespace uniep::cuda
