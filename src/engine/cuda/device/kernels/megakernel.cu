// The layer's kernel: a launch runs the stages of RankProgram::stages[launch] for all ranks of the launch.
// Persistent, one CTA an SM, in clusters of UNIEP_CLUSTER. Compiled at run time with its tile as macros.
#include "engine/cuda/device/arguments/layer_launch.h"
#include "engine/cuda/device/kernels/layer_copy.h"
#include "engine/cuda/device/kernels/layer_signals.h"
#include "engine/cuda/device/mainloop/layer_loader.h"
#include "engine/cuda/device/mainloop/layer_math.h"
#include "engine/cuda/device/ptx/warpgroup.h"
#include "engine/cuda/device/schedule/layer_scheduler.h"
#include "engine/cuda/device/signals/finish.h"

namespace uniep::cuda {

constexpr auto kGemms = static_cast<LayerGemms>(UNIEP_GEMMS);
constexpr ExpertConfig kExpert{.activation = static_cast<ActivationKind>(UNIEP_ACTIVATION),
                               .weighs_z = UNIEP_WEIGHS_Z != 0,
                               .weighs_output = UNIEP_WEIGHS_OUTPUT != 0,
                               .bias = UNIEP_BIAS != 0,
                               .alpha = UNIEP_ALPHA,
                               .gate_limit = UNIEP_GATE_LIMIT,
                               .up_limit = UNIEP_UP_LIMIT,
                               .up_offset = UNIEP_UP_OFFSET};
constexpr GemmConfig kOwnGemm = layer_gemm(kGemms, {.tile_n = UNIEP_TILE_N,
                                                    .pipeline_stages = UNIEP_STAGES,
                                                    .cluster = UNIEP_CLUSTER,
                                                    .ring_stage_bytes = UNIEP_COPY_CHUNK_BYTES,
                                                    .copy_stages = UNIEP_COPY_STAGES,
                                                    .expert = kExpert});
constexpr LayerKernelConfig kLayer{
    .gemms = kGemms,
    .gemm = kGemms == LayerGemms::kGradients ? beside_first_gradient(kOwnGemm, UNIEP_FIRST_TILE_N) : kOwnGemm,
    .combine = static_cast<CombineKind>(UNIEP_COMBINE),
    .on_sms = UNIEP_ON_SMS != 0,
    .filled = static_cast<FilledGradients>(UNIEP_FILLED),
    .mixed = UNIEP_MIXED != 0,
    .first_tile_n = UNIEP_FIRST_TILE_N};
static_assert(kLayer.filled == FilledGradients::kNone || has_second_gradient(kGemms),
              "weight gradients follow dgrad FC1");
static_assert(!kLayer.mixed || (kGemms == LayerGemms::kGradients && kLayer.filled != FilledGradients::kNone),
              "weight gradients beside the dgrads are in the launch of both");
static_assert(kGemms != LayerGemms::kGradients || kLayer.first_tile_n == 128 || kLayer.first_tile_n == 192,
              "dSwiGLU's B may be halved along K");
using Storage = LayerStorage<kLayer>;
static_assert(sizeof(Storage) <= shared_memory_bytes(kLayer.gemm), "the host asks for too little shared memory");
static_assert(shared_memory_bytes(kLayer.gemm) <= kSharedMemoryLimit, "more shared memory than an SM has");
static_assert(kLayer.gemm.tile_n == 128 || kLayer.gemm.tile_n == (kGemms == LayerGemms::kFirstGradient ? 192 : 256),
              "B comes in halves of 64 or 128 columns; dSwiGLU's may be halved along K");
static_assert(kLayer.gemm.cluster == 1 || kLayer.gemm.cluster == 2, "B is shared by two CTAs at most");

constexpr uint32_t kLoaderWarp = 0;
constexpr uint32_t kSchedulerWarp = 1;
constexpr uint32_t kCopyWarp = 2;
constexpr uint32_t kSignalWarp = 3;
constexpr uint32_t kFirstMathWarp = 4;

UNIEP_DEVICE void initialise_barriers(Storage& shared) {
  for (int stage = 0; stage < kLayer.gemm.pipeline_stages; ++stage) {
    ptx::mbarrier_init(shared.full[stage], 1);
    ptx::mbarrier_init(shared.empty[stage], kMathWarps * kLayer.gemm.cluster);
  }
  for (int slot = 0; slot < kLayerTaskSlots; ++slot) {
    ptx::mbarrier_init(shared.tasks.full[slot], 1);
    ptx::mbarrier_init(shared.tasks.empty[slot], kLayerTaskReaders * kLayer.gemm.cluster);
    ptx::mbarrier_init(shared.stored[slot], kMathWarps);
  }
  ptx::mbarrier_init(shared.deal, 1);
  for (uint64_t& put : shared.put) ptx::mbarrier_init(put, kMathWarps);
  init_copy_ring(shared.copy_ring);
  ptx::fence_mbarrier_init();
}

UNIEP_DEVICE void copy_call(Storage& shared, const RankCall& call) {
  const uint32_t target = ptx::shared_address(&shared.call);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&call);
  for (uint32_t at = threadIdx.x * 16; at < sizeof(RankCall); at += kGemmThreads * 16) {
    ptx::store_shared_16(target + at, ptx::load_global_16(bytes + at));
  }
}

UNIEP_DEVICE ComputeList compute_list(const RunningCall& running) {
  const RankProgram& p = running.call.program;
  constexpr ListKind kKind = ListKind::kCompute;
  const bool walks = walks_list(p, running.launch, running.worker, AgentRole::kCompute, kKind);
  ComputeList list{participants_of(p, running.launch, kKind), walks ? list_length(p, running.launch, kKind) : 0};
  list.in_gemm_queues = list.length > 0 && has_gemm_queues(p, running.launch);
  if (list.in_gemm_queues) {
    list.queues = gemm_queues(p, running.launch);
    list.walk = begin_walk(p, running.launch, running.worker, list.queues);
    list.begin = gemm_positions(p, list.queues);
  }
  return list;
}

UNIEP_DEVICE void begin_mixed_list(const RunningCall& /*running*/, MixedList<false>& /*mixed*/) {}
UNIEP_DEVICE void begin_mixed_list(const RunningCall& running, MixedList<true>& mixed) {
  mixed.queues = wgrad_queues(running.call.program, running.launch);
  mixed.walk = begin_walk(running.call.program, running.launch, running.worker, mixed.queues);
  for (ListCursor& cursor : mixed.cursors) cursor = mixed.walk.cursor;
}

UNIEP_DEVICE bool dispatches_first(const RunningCall& running) {
  const RankProgram& p = running.call.program;
  return p.stages[running.launch].dispatch && running.worker < first_copying_workers(p);
}

// A warp's share of the maps, which the host wrote to memory that an earlier call's maps may have been in.
UNIEP_DEVICE void acquire_maps(const RankCall& call) {
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  if (lane == 0) {
    ptx::tma_acquire_map(call.first_a);
    ptx::tma_acquire_map(call.second_a);
  }
  if (kGemms != LayerGemms::kForward && lane < kGradientMaps) ptx::tma_acquire_map(call.gradient_maps[lane]);
  for (int32_t i = lane; i < call.first_maps; i += 32) ptx::tma_acquire_map(call.first_b[i]);
  for (int32_t i = lane; i < call.second_maps; i += 32) ptx::tma_acquire_map(call.second_b[i]);
  if constexpr (lends_stages(filled_gemm(kLayer))) {
    for (const GradientMatrices& gradients : call.gradients) {
      if (gradients.maps == nullptr) continue;
      for (int32_t i = lane; i < (gradients.addresses != nullptr ? call.program.local_experts : 1); i += 32) {
        ptx::tma_acquire_map(gradients.maps[i]);
      }
    }
  }
  __syncwarp();
}

// Which worker a CTA is, and when it leaves.
UNIEP_DEVICE void begin_worker(Storage& shared, const LayerLaunch& launch, const RankProgram& p, int32_t cta) {
  const int32_t first_lent = kept_workers(p);
  shared.worker = cta < p.workers ? cta : first_lent + (cta - p.workers) % p.lent_workers;
  shared.leaves_ns = launch.slice_ns > 0 && cta >= first_lent ? ptx::nanoseconds() + launch.slice_ns : 0;
}

UNIEP_DEVICE void join_cta_or_cluster() {
  if constexpr (kLayer.gemm.cluster == 1) {
    __syncthreads();
  } else {
    ptx::cluster_barrier();
  }
}

// One thread a warp: loader. One warp: scheduler (in the cluster's first CTA), copy, signals, eight of math.
extern "C" __global__ void __launch_bounds__(kGemmThreads, 1) uniep_layer(const __grid_constant__ LayerLaunch launch) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Storage& shared = *reinterpret_cast<Storage*>(memory);
  const uint32_t warp = ptx::warp_index();
  const int32_t cta = static_cast<int32_t>(blockIdx.x);
  const RankCall& global_call = launch.calls[cta / launch.ctas];
  copy_call(shared, global_call);
  if (warp == kLoaderWarp) {
    if (ptx::lane_index() == 0) initialise_barriers(shared);
    acquire_maps(global_call);
  }
  if (threadIdx.x == kSchedulerWarp * ptx::kThreadsPerWarp) {
    shared.epoch = global_call.state->epoch;
    shared.launch = launch.launch;
    begin_worker(shared, launch, global_call.program, cta % launch.ctas);
    shared.reduce_items = 0;
    shared.walk.record.thread = kCopyWarp * ptx::kThreadsPerWarp;
    shared.reduce_record.thread = kFirstMathWarp * ptx::kThreadsPerWarp;
  }
  __syncthreads();
  if (threadIdx.x == kSchedulerWarp * ptx::kThreadsPerWarp) {
    shared.compute = compute_list(running_call(shared));
    begin_mixed_list(running_call(shared), shared.mixed);
    if (shared.leaves_ns != 0) wait_for_peers_or_leave(running_call(shared));
  }
  __syncwarp();
  if constexpr (kLayer.on_sms) {
    if (dispatches_first(running_call(shared))) dispatch_first<kLayer>(shared, warp);
  }
  join_cta_or_cluster();

  if (warp < kFirstMathWarp) {
    ptx::lower_registers<kProducerRegisters>();
    if (warp == kLoaderWarp) {
      if (ptx::lane_index() == 0) run_layer_loader<kLayer>(global_call, shared);
      __syncwarp();
    } else if (warp == kSchedulerWarp) {
      if (kLayer.gemm.cluster == 1 || ptx::cluster_rank() == 0) run_layer_scheduler<kLayer>(shared);
      __syncwarp();
    } else if (warp == kCopyWarp) {
      run_layer_copy<kLayer>(shared);
    } else {
      run_layer_signals<kLayer>(shared);
    }
    ptx::named_barrier(kLaunchEndBarrier, kGemmThreads);
    if (ptx::warp_index() == kSignalWarp) finish_launch(running_call(shared), launch.ctas);
  } else {
    ptx::raise_registers<kMathRegisters>();
    run_layer_math<kLayer>(shared, static_cast<int32_t>(warp) - static_cast<int32_t>(kFirstMathWarp));
    send_and_reduce<kLayer>(shared, ptx::warp_index() - kFirstMathWarp);
    ptx::named_barrier(kLaunchEndBarrier, kGemmThreads);
  }
  __syncwarp();
  // No CTA leaves while its neighbour may still arrive at its barriers.
  if constexpr (kLayer.gemm.cluster > 1) join_cta_or_cluster();
}

}  // namespace uniep::cuda
