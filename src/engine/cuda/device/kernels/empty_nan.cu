// y of ranks whose placement has no rows is NaN instead of 0, so that a loop of replays, in which nobody throws, sees
// it (GroupOptions::nan_on_overflow). Behind the call, kEmptyBlocks CTAs a rank; blockIdx.y says which.
#include "engine/cuda/device/arguments/empty_arguments.h"
#include "engine/cuda/device/arguments/place_arguments.h"

namespace uniep::cuda {

extern "C" __global__ void uniep_empty_nan(const __grid_constant__ EmptyArguments args) {
  const EmptyArguments::Rank& rank = args.rank[blockIdx.y];
  if (*rank.whole != kEmptied) return;
  constexpr uint16_t kNan = 0x7fc0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rank.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    rank.y[i] = BFloat16{kNan};
  }
}

}  // namespace uniep::cuda
