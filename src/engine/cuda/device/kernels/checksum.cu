// Contract: adds to *sum what the 32-bit words of an array give to a tensor's checksum (io/checksum.h). Any number of
// CTAs.
#include "engine/cuda/device/arguments/checksum_arguments.h"
#include "engine/cuda/device/ptx/common.h"
#include "io/checksum.h"

namespace uniep::cuda {

UNIEP_DEVICE uint32_t last_word(const ChecksumArguments& args) {
  uint32_t word = 0;
  for (int64_t at = args.bytes & ~int64_t{3}; at < args.bytes; ++at) {
    word |= static_cast<uint32_t>(static_cast<const uint8_t*>(args.memory)[at]) << (at & 3) * 8;
  }
  return word;
}

extern "C" __global__ void __launch_bounds__(kChecksumThreads)
    uniep_checksum(const __grid_constant__ ChecksumArguments args) {
  const int64_t words = args.bytes / 4;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kChecksumThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kChecksumThreads;
  uint64_t sum = 0;
  for (int64_t i = thread; i < words; i += threads) {
    sum += io::mix64(args.first_word + static_cast<uint64_t>(i), static_cast<const uint32_t*>(args.memory)[i]);
  }
  if (thread == 0 && args.bytes % 4 != 0) {
    sum += io::mix64(args.first_word + static_cast<uint64_t>(words), last_word(args));
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (ptx::lane_index() == 0) atomicAdd(args.sum, sum);
}

}  // namespace uniep::cuda
