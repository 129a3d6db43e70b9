// Dispatch or combine alone: the launches of a Program without its GEMM stages (engine/cuda/kernels/exchange.h). All
// warps of all CTAs copy, each through a ring of its own; in a combine the last warps of a CTA sum what comes back
// while the others still send. Compiled at run time with its warps and rings as macros.
#include "engine/cuda/device/arguments/layer_launch.h"
#include "engine/cuda/device/signals/finish.h"
#include "engine/cuda/device/transfer/copy_agent.h"
#include "engine/cuda/device/transfer/reduce.h"
#include "program/kernel_memory.h"

namespace uniep::cuda {

constexpr uint32_t kWarps = UNIEP_WARPS;
constexpr uint32_t kReduceWarps = UNIEP_REDUCE_WARPS;
constexpr uint32_t kSendWarps = kWarps - kReduceWarps;
static_assert(kWarps <= 32, "a CTA has at most 1024 threads");
static_assert(kReduceWarps < kWarps, "some warps send");

using Copy = CopyStorage<UNIEP_CHUNK_BYTES, UNIEP_COPY_STAGES>;
using Ring = CopyRing<decltype(Copy::ring)>;
using Sum = RingSum<Ring, 4>;

struct Storage {
  Copy copies[kWarps];
  RankCall call;  // a copy: read often, by all warps
  uint32_t epoch;
  int32_t launch, worker;
  uint64_t leaves_ns;     // 0: nobody is lent
  uint32_t reduce_items;  // that the CTA's warps have dealt among themselves
};
constexpr int kBytes = exchange_kernel_bytes(UNIEP_WARPS, UNIEP_CHUNK_BYTES, UNIEP_COPY_STAGES);
static_assert(sizeof(Storage) <= kBytes, "the host asks for too little shared memory");
static_assert(kBytes <= kSharedMemoryLimit, "more shared memory than an SM has");

UNIEP_DEVICE void copy_call(Storage& shared, const RankCall& call) {
  const uint32_t target = ptx::shared_address(&shared.call);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&call);
  for (uint32_t at = threadIdx.x * 16; at < sizeof(RankCall); at += blockDim.x * 16) {
    ptx::store_shared_16(target + at, ptx::load_global_16_once(bytes + at));
  }
}

// The send list of a combine.
UNIEP_DEVICE bool run_sends(const RunningCall& running, Ring& ring, Sum& sum, WalkState& walk, uint32_t warp) {
  const Share share{warp, kSendWarps};
  if (running.call.program.combine_groups == 0) return run_send(running, ring, walk, share);
  return run_group_send(running, walk, share, SendTeam{}, sum);
}

// The rows' probs, for callers that do not read row tables; a thread a row.
UNIEP_DEVICE void write_row_probs(const RunningCall& running) {
  const RankProgram& p = running.call.program;
  const int32_t last = p.first_expert + p.local_experts - 1;
  const int64_t rows = p.segment_start[last] + round_up(p.expert_rows[last], kRowAlignment);
  const int64_t stride = static_cast<int64_t>(p.workers) * blockDim.x;
  for (int64_t row = static_cast<int64_t>(running.worker) * blockDim.x + threadIdx.x; row < rows; row += stride) {
    const RowSource source = p.rows[row];
    running.call.row_probs[row] = source.rank < 0 ? 0.0f : source.prob;
  }
}

UNIEP_DEVICE void run_warp(const RunningCall& running, Storage& shared, uint32_t warp) {
  Copy& copy = shared.copies[warp];
  Ring ring(copy.ring);
  Sum sum(ring);
  if (!run_dispatch(running, ring, copy.walk, Share{warp, kWarps})) return;
  if (warp < kSendWarps && !run_sends(running, ring, sum, copy.walk, warp)) return;
  run_reduce(running, &shared.reduce_items, sum, copy_recorder(running, copy.walk));
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1)
    uniep_exchange(const __grid_constant__ LayerLaunch launch) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Storage& shared = *reinterpret_cast<Storage*>(memory);
  const uint32_t warp = ptx::warp_uniform(threadIdx.x / ptx::kThreadsPerWarp);
  const int32_t cta = static_cast<int32_t>(blockIdx.x);
  const RankCall& call = launch.calls[cta / launch.ctas];
  copy_call(shared, call);
  if (ptx::lane_index() == 0) {
    init_copy_ring(shared.copies[warp].ring);
    shared.copies[warp].walk.record.thread = warp == 0 ? threadIdx.x : kNobody;
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == 0) {
    shared.epoch = call.state->epoch;
    shared.launch = launch.launch;
    shared.worker = cta % launch.ctas;
    shared.leaves_ns = 0;
    shared.reduce_items = 0;
  }
  __syncthreads();
  const RunningCall running{shared.call, shared.epoch, shared.launch, shared.worker, shared.leaves_ns};
  const bool dispatches = running.call.program.stages[running.launch].dispatch;
  if (dispatches && running.call.row_probs != nullptr) write_row_probs(running);
  run_warp(running, shared, warp);
  __syncthreads();
  if (warp == 0) finish_launch(running, launch.ctas);
}

}  // namespace uniep::cuda
