// Copies one buffer to another over and over for a while, as fast as memory goes.
#include "engine/cuda/device/ptx/common.h"
#include "engine/cuda/device/ptx/memory.h"
#include "tests/cuda/traffic_arguments.h"

using namespace uniep;
using namespace uniep::cuda;
using namespace uniep::cuda::test;

extern "C" __global__ void test_traffic(const __grid_constant__ TrafficArguments args) {
  constexpr int kAtOnce = 4;
  const uint64_t begin = ptx::nanoseconds();
  const auto* const source = static_cast<const ptx::Vector16*>(args.source);
  auto* const target = static_cast<ptx::Vector16*>(args.target);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x, stride = threads * kAtOnce;
  int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  while (ptx::nanoseconds() - begin < args.nanoseconds) {
    ptx::Vector16 values[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) values[i] = ptx::load_global_16_once(source + at + i * threads);
    for (int i = 0; i < kAtOnce; ++i) ptx::store_global_16(target + at + i * threads, values[i]);
    at = at + stride + (kAtOnce - 1) * threads < args.vectors ? at + stride : at % threads;
  }
}
