// How much an SM takes in and gives out when rows come by bulk copies and leave to several places: what dispatch on few
// SMs can reach at most. Rows of 4 KiB on one GPU; each comes in once and goes out `copies` times, by bulk copies or by
// 16-byte stores of all threads.
//   nvcc -arch=sm_90a -O3 -o sm_ports bench/sm_ports.cu && ./sm_ports
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kWarps = 16, kStages = 3, kRowBytes = 4096, kRowsOfWarp = 200;
constexpr int kSharedBytes = kWarps * kStages * kRowBytes;

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void load(const uint8_t* row, uint8_t* stage, uint64_t& full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full)), "r"(kRowBytes));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(stage)),
               "l"(row), "r"(kRowBytes), "r"(shared_address(&full))
               : "memory");
}

__device__ void wait(uint64_t& full, uint32_t phase) {
  for (uint32_t done = 0; done == 0;) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(&full)), "r"(phase)
                 : "memory");
  }
}

__global__ void __launch_bounds__(32 * kWarps)
    fan_out(const uint8_t* in, uint8_t* out, int64_t places, int copies, bool by_bulk) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t barriers[kWarps][kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint64_t* const full = barriers[warp];
  uint8_t* const ring = memory + warp * kStages * kRowBytes;
  if (lane == 0) {
    for (int s = 0; s < kStages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int64_t first = blockIdx.x * kWarps + warp, stride = gridDim.x * kWarps;
  for (int s = 0; lane == 0 && s < kStages; ++s)
    load(in + (first + s * stride) * kRowBytes, ring + s * kRowBytes, full[s]);
  int stage = 0;
  uint32_t phase = 0;
  for (int i = 0; i < kRowsOfWarp; ++i) {
    wait(full[stage], phase);
    const int64_t row = first + i * stride;
    const auto place = [&](int copy) { return out + (row * 7919 + copy * 104729) % places * kRowBytes; };
    uint8_t* const source = ring + stage * kRowBytes;
    if (by_bulk) {
      if (lane < copies) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(place(lane)),
                     "r"(shared_address(source)), "r"(kRowBytes)
                     : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;");
      asm volatile("cp.async.bulk.wait_group.read 0;");
    } else {
      for (int at = lane * 16; at < kRowBytes; at += 512) {
        const uint4 value = *reinterpret_cast<uint4*>(source + at);
        for (int copy = 0; copy < copies; ++copy) *reinterpret_cast<uint4*>(place(copy) + at) = value;
      }
    }
    __syncwarp();
    if (lane == 0 && i + kStages < kRowsOfWarp) load(in + (row + kStages * stride) * kRowBytes, source, full[stage]);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;");
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "sm_ports: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

}  // namespace

int main() {
  constexpr int64_t kBytes = int64_t{1} << 30;
  uint8_t *in, *out;
  check(cudaMalloc(&in, kBytes));
  check(cudaMalloc(&out, 2 * kBytes));
  check(cudaFuncSetAttribute(fan_out, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  for (const int sms : {1, 8, 32}) {
    for (const int copies : {1, 2, 3}) {
      for (const bool by_bulk : {true, false}) {
        float best = 1e9f;
        for (int repeat = 0; repeat < 3; ++repeat) {
          check(cudaEventRecord(begin));
          fan_out<<<sms, 32 * kWarps, kSharedBytes>>>(in, out, 2 * kBytes / kRowBytes, copies, by_bulk);
          check(cudaEventRecord(end));
          check(cudaEventSynchronize(end));
          float milliseconds = 0;
          check(cudaEventElapsedTime(&milliseconds, begin, end));
          best = milliseconds < best ? milliseconds : best;
        }
        const double rate = double{kRowsOfWarp} * kWarps * kRowBytes / best / 1e6;
        std::printf("%2d SMs, %d copies, %-6s: %5.1f GB/s in, %5.1f GB/s out an SM\n", sms, copies,
                    by_bulk ? "bulk" : "stores", rate, rate * copies);
      }
    }
  }
}
