// CTAs that keep their SMs for a while, as those of a collective do whose peers come late.
#include "engine/cuda/device/ptx/common.h"
#include "tests/cuda/hold_arguments.h"

using namespace uniep;
using namespace uniep::cuda;
using namespace uniep::cuda::test;

extern "C" __global__ void test_hold(const __grid_constant__ HoldArguments args) {
  const uint64_t begin = ptx::nanoseconds();
  if (threadIdx.x == 0) args.begun[blockIdx.x] = begin;
  while (ptx::nanoseconds() - begin < args.nanoseconds) __nanosleep(200);
}
