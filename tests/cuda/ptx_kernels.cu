// One small kernel for each group of PTX wrappers.
#include "engine/cuda/device/mainloop/wgmma.h"
#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/ptx/matrix.h"
#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/memory.h"
#include "engine/cuda/device/ptx/tma.h"
#include "engine/cuda/device/ptx/warpgroup.h"
#include "model/elementwise.h"
#include "tests/cuda/ptx_arguments.h"

using namespace uniep;
using namespace uniep::cuda;
using namespace uniep::cuda::test;

constexpr uint32_t kTestBoxBytes = 64 * 128;

// Load and store of a box that sticks out of the tensor.
extern "C" __global__ void test_tma(const __grid_constant__ PtxArguments args) {
  __shared__ __align__(1024) uint8_t box[kTestBoxBytes];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::tma_prefetch_map(args.load);
    ptx::mbarrier_arrive_expect_bytes(barrier, kTestBoxBytes);
    const uint32_t address = ptx::shared_address(box);
    ptx::tma_load_3d(address, args.load, barrier, {64, 32, 1});
    ptx::mbarrier_wait(barrier, 0, "box");
    ptx::tma_store_3d(args.store, address, 64, 32, 1);
    ptx::bulk_commit();
    ptx::bulk_wait_complete<0>();
  }
}

// Plain runs of bytes, also with the reading wait.
extern "C" __global__ void test_bulk(const __grid_constant__ PtxArguments args) {
  __shared__ __align__(128) uint8_t bytes[4096];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    for (uint32_t turn = 0; turn < 3; ++turn) {
      ptx::mbarrier_arrive_expect_bytes(barrier, 4096);
      ptx::bulk_load(ptx::shared_address(bytes), args.source + turn * 2048, 4096, barrier);
      ptx::mbarrier_wait(barrier, turn & 1, "bytes");
      ptx::bulk_store(args.target + turn * 2048, ptx::shared_address(bytes), 4096);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    ptx::bulk_wait_complete<0>();
  }
}

// A cluster of two: each CTA sends one box to both; CTA 1 also arrives at CTA 0's barrier. words: ranks.
extern "C" __global__ void __cluster_dims__(2, 1, 1) test_cluster(const __grid_constant__ PtxArguments args) {
  __shared__ __align__(1024) uint8_t boxes[2][kTestBoxBytes];
  __shared__ uint64_t barrier;
  __shared__ uint64_t remote;
  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init(remote, 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cluster_barrier();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_bytes(barrier, 2 * kTestBoxBytes);
    ptx::tma_load_3d_multicast(ptx::shared_address(boxes[rank]), args.load, barrier, 3,
                               {0, static_cast<int>(rank) * 64, 0});
    ptx::mbarrier_arrive_remote(remote, 0);
    if (rank == 0) ptx::mbarrier_wait(remote, 0, "remote arrivals");
    args.words[rank] = rank;
  }
  ptx::mbarrier_wait(barrier, 0, "boxes");
  for (uint32_t i = threadIdx.x; i < kTestBoxBytes; i += blockDim.x) {
    // Undoes the swizzle: 16-byte chunk c of row r lies at c ^ (r % 8).
    const uint32_t row = i / 64;
    const uint32_t column = i % 64;
    const uint32_t box = row / 64;
    const uint32_t at = row % 64 * 128 + (((column / 8) ^ (row % 8)) * 16) + column % 8 * 2;
    args.target[rank * kTestBoxBytes + i] = *reinterpret_cast<uint16_t*>(boxes[box] + at);
  }
  ptx::cluster_barrier();
}

template <int kN, Major kMajorA, Major kMajorB>
__device__ void multiply(const PtxArguments& args, uint8_t* a, uint8_t* b) {
  float d[kN / 2];
  const uint64_t a_operand = operand_descriptor<kMajorA>(ptx::shared_address(a));
  const uint64_t b_operand = operand_descriptor<kMajorB>(ptx::shared_address(b));
  wgmma_fence();
  Wgmma<kN, kMajorA, kMajorB>::start(d, a_operand, b_operand);
#pragma unroll
  for (int step = 1; step < 4; ++step) {
    Wgmma<kN, kMajorA, kMajorB>::add(d, a_operand + step * kDescriptorStepK16<kMajorA>,
                                     b_operand + step * kDescriptorStepK16<kMajorB>);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(d);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    args.result[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i];
  }
}

// args.load: A, args.store: B, as boxes of 64 x 64; TEST_N and the majors are macros.
extern "C" __global__ void __launch_bounds__(128) test_wgmma(const __grid_constant__ PtxArguments args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint64_t& barrier = *reinterpret_cast<uint64_t*>(memory + 5 * kTestBoxBytes);
  constexpr Major kMajorA = TEST_MAJOR_A ? Major::kMN : Major::kK;
  constexpr Major kMajorB = TEST_MAJOR_B ? Major::kMN : Major::kK;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_bytes(barrier, kTestBoxBytes * (1 + TEST_N / 64));
    ptx::tma_load_3d(ptx::shared_address(memory), args.load, barrier, {0, 0, 0});
    for (int i = 0; i < TEST_N / 64; ++i) {
      ptx::tma_load_3d(ptx::shared_address(memory) + (1 + i) * kTestBoxBytes, args.store, barrier,
                       {kMajorB == Major::kMN ? i * 64 : 0, kMajorB == Major::kMN ? 0 : i * 64, 0});
    }
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0, "operands");
  multiply<TEST_N, kMajorA, kMajorB>(args, memory, memory + kTestBoxBytes);
}

// words[0]: errors of stmatrix and ldmatrix, [1]: of cp.async, [2]: named barrier and setmaxnreg.
extern "C" __global__ void __launch_bounds__(384, 1) test_warp(const __grid_constant__ PtxArguments args) {
  __shared__ __align__(128) uint16_t tile[256];
  __shared__ __align__(128) uint16_t copied[16];
  __shared__ uint32_t turns;
  const uint32_t lane = ptx::lane_index();
  if (threadIdx.x == 0) turns = 0;
  if (threadIdx.x < 32) {
    // Four 8x8 matrices after one another; value = 64 matrix + 8 row + column.
    uint32_t m[4];
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t first = 64 * i + 8 * (lane / 4) + 2 * (lane % 4);
      m[i] = first | (first + 1) << 16;
    }
    const uint32_t address = ptx::shared_address(tile) + lane * 16;
    ptx::store_matrix_x4(address, m[0], m[1], m[2], m[3]);
    __syncwarp();
    uint32_t wrong = 0;
    for (uint32_t i = lane; i < 256; i += 32) wrong += tile[i] != i;
    uint32_t back[4];
    ptx::load_matrix_x4(address, back[0], back[1], back[2], back[3]);
    for (int i = 0; i < 4; ++i) wrong += back[i] != m[i];
    atomicAdd(args.words, wrong);
    if (lane < 2) ptx::copy_async_16(ptx::shared_address(copied) + lane * 16, args.source, lane == 0);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncwarp();
    if (lane < 16) atomicAdd(args.words + 1, copied[lane] != (lane < 8 ? args.source[lane] : 0));
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::lower_registers<40>();
    atomicAdd(&turns, 1u);
    ptx::named_barrier(1, 384);
  } else {
    ptx::raise_registers<232>();
    ptx::named_barrier(1, 384);
    if (threadIdx.x == 128) args.words[2] = turns;
  }
}

// Block 0 writes and releases, block 1 acquires and reads; words[0]: flag, [1]: counter, [2]: errors.
extern "C" __global__ void test_flags(const __grid_constant__ PtxArguments args) {
  if (blockIdx.x == 0) {
    for (uint32_t i = threadIdx.x; i < 4096; i += blockDim.x) args.target[i] = static_cast<uint16_t>(i * 7);
    ptx::add_release_gpu(args.words + 1, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::fence_gpu();
      ptx::add_release_gpu(args.words, 5);
    }
  } else {
    while (ptx::load_acquire_gpu(args.words) != 5) {
    }
    uint32_t wrong = ptx::load_acquire_gpu(args.words + 1) != blockDim.x;
    for (uint32_t i = threadIdx.x; i < 4096; i += blockDim.x) {
      wrong += *reinterpret_cast<volatile uint16_t*>(args.target + i) != static_cast<uint16_t>(i * 7);
    }
    if (wrong != 0) atomicAdd(args.words + 2, wrong);
  }
}

// In place, a value a thread.
extern "C" __global__ void test_sigmoid(const __grid_constant__ PtxArguments args) {
  float& value = args.result[blockIdx.x * blockDim.x + threadIdx.x];
  value = sigmoid(value);
}

// More values at once than such a block's threads have registers.
extern "C" __global__ void __launch_bounds__(1024, 2) test_spill(const __grid_constant__ PtxArguments args) {
  constexpr int kValues = 64;
  volatile uint32_t* const words = args.words;
  uint32_t values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = words[i];
#pragma unroll
  for (int i = 0; i < kValues; ++i) words[i] = values[kValues - 1 - i];
}
