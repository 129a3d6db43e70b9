// All ranks write to all ranks, over and over, with arrive and done between: what every fused kernel relies on.
#include "engine/cuda/device/ptx/memory.h"
#include "program/edges.h"
#include "tests/cuda/comm_arguments.h"

using namespace uniep;
using namespace uniep::cuda;
using namespace uniep::cuda::test;

// One thread. False when `limit_nanoseconds` pass first; the report then says what was missing.
__device__ bool wait_for_flag(const uint32_t* flag, uint32_t epoch, const ExchangeArguments& args, int rank, int peer,
                              FlagSpace space) {
  const uint64_t begin = ptx::nanoseconds();
  for (;;) {
    const uint32_t seen = ptx::load_acquire_system(flag);
    if (static_cast<int32_t>(seen - epoch) >= 0) return true;
    if (ptx::nanoseconds() - begin > args.limit_nanoseconds) {
      WaitReport content{};
      content.rank = rank;
      content.stage = kNoStage;
      content.awaited = {SignalKind::kFlag, static_cast<int32_t>(space), peer, epoch, seen};
      write_report(args.report[rank], content);
      return false;
    }
    __nanosleep(64);
  }
}

__device__ __forceinline__ uint32_t pattern(uint32_t epoch, uint32_t source, uint32_t target, uint32_t word) {
  return (epoch * 2654435761u) ^ (source * 40503u + target * 9176u) ^ (word * 2246822519u);
}

// By the last CTA of a rank: signals all peers.
__device__ void publish(const ExchangeArguments& args, int rank, int kind, uint32_t epoch, uint32_t target) {
  ptx::fence_system();
  if (atomicAdd(args.counters[rank] + kind, 1u) + 1 != target) return;
  ptx::fence_system();
  for (int peer = 0; peer < args.ranks; ++peer) {
    auto* const block = reinterpret_cast<ExchangeFlags*>(args.memory[rank][peer]);
    ptx::store_release_system((kind == 0 ? block->arrive : block->done) + rank, epoch);
  }
}

extern "C" __global__ void test_exchange(ExchangeArguments args) {
  __shared__ int failed;
  const int rank = args.first_rank + static_cast<int>(blockIdx.x) / args.ctas;
  const int cta = static_cast<int>(blockIdx.x) % args.ctas;
  const int thread = cta * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  const int threads = args.ctas * static_cast<int>(blockDim.x);
  auto* const mine = reinterpret_cast<ExchangeFlags*>(args.memory[rank][rank]);
  const uint32_t base = *args.epoch[rank];
  if (threadIdx.x == 0) failed = 0;
  __syncthreads();
  const auto wait_for_all = [&](const uint32_t* flags, uint32_t epoch, FlagSpace space) {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < args.ranks && !wait_for_flag(flags + peer, epoch, args, rank, peer, space)) {
      failed = 1;
    }
    __syncthreads();
    return failed == 0;
  };
  for (int iteration = 1; iteration <= args.iterations; ++iteration) {
    const uint32_t epoch = base + static_cast<uint32_t>(iteration);
    const uint32_t calls = static_cast<uint32_t>(args.ctas * iteration);
    if (!wait_for_all(mine->done, epoch - 1, FlagSpace::kDone)) return;
    for (int peer = 0; peer < args.ranks; ++peer) {
      auto* const slot =
          reinterpret_cast<uint32_t*>(args.memory[rank][peer] + sizeof(ExchangeFlags)) + rank * args.words;
      for (int i = thread; i < args.words; i += threads) {
        slot[i] = pattern(epoch, static_cast<uint32_t>(rank), static_cast<uint32_t>(peer), static_cast<uint32_t>(i));
      }
    }
    for (int i = thread; i < args.load_words; i += threads) args.load[rank][i] += epoch;
    __syncthreads();
    const bool silent = rank == args.silent_rank && iteration == args.iterations;
    if (threadIdx.x == 0 && !silent) publish(args, rank, 0, epoch, calls);
    if (!wait_for_all(mine->arrive, epoch, FlagSpace::kArrive)) return;
    unsigned long long wrong = 0;
    for (int peer = 0; peer < args.ranks; ++peer) {
      const auto* const slot =
          reinterpret_cast<const uint32_t*>(args.memory[rank][rank] + sizeof(ExchangeFlags)) + peer * args.words;
      for (int i = thread; i < args.words; i += threads) {
        uint32_t value;
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(slot + i) : "memory");
        wrong +=
            value != pattern(epoch, static_cast<uint32_t>(peer), static_cast<uint32_t>(rank), static_cast<uint32_t>(i));
      }
    }
    if (wrong != 0) atomicAdd(args.errors, wrong);
    __syncthreads();
    if (threadIdx.x == 0) publish(args, rank, 1, epoch, calls);
  }
  if (!wait_for_all(mine->done, base + static_cast<uint32_t>(args.iterations), FlagSpace::kDone)) return;
  if (thread == 0) *args.epoch[rank] = base + static_cast<uint32_t>(args.iterations);
}
