// dprob's last step: the 64-column sums of a row, ascending, by one owner.
#include "engine/cuda/device/arguments/prob_sum_arguments.h"
#include "engine/cuda/device/ptx/common.h"
#include "model/elementwise.h"

namespace uniep::cuda {

extern "C" __global__ void uniep_sum_prob_chunks(ProbSumArguments args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.rows) return;
  float sum = 0.0f;
  for (int32_t chunk = 0; chunk < args.chunk_count; ++chunk) sum = add(sum, args.chunks[chunk * args.stride + row]);
  args.dprob[row] = sum;
}

}  // namespace uniep::cuda
