// One thread that holds its stream up for a while.
#include "engine/cuda/device/ptx/common.h"
#include "tests/cuda/delay_arguments.h"

using namespace uniep;
using namespace uniep::cuda;
using namespace uniep::cuda::test;

extern "C" __global__ void test_delay(const __grid_constant__ DelayArguments args) {
  const uint64_t begin = ptx::nanoseconds();
  while (ptx::nanoseconds() - begin < args.nanoseconds) __nanosleep(100);
}
