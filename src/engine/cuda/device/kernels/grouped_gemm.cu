// The grouped GEMM kernel. Compiled at run time with its configuration as macros; see GemmConfig.
#include "engine/cuda/device/mainloop/loader.h"
#include "engine/cuda/device/mainloop/math.h"
#include "engine/cuda/device/ptx/warpgroup.h"
#include "engine/cuda/device/schedule/scheduler.h"

namespace uniep::cuda {

constexpr GemmConfig kConfig{.layout = static_cast<Layout>(UNIEP_LAYOUT),
                             .epilogue = static_cast<Epilogue>(UNIEP_EPILOGUE),
                             .tile_n = UNIEP_TILE_N,
                             .pipeline_stages = UNIEP_STAGES,
                             .cluster = UNIEP_CLUSTER,
                             .maps = UNIEP_MAPS,
                             .outputs = UNIEP_OUTPUTS};
using Storage = SharedStorage<kConfig>;
using Arguments = GemmKernelArguments<kConfig.maps + output_maps(kConfig), kConfig.outputs>;
static_assert(sizeof(Storage) <= shared_memory_bytes(kConfig), "the host asks for too little shared memory");
static_assert(shared_memory_bytes(kConfig) <= kSharedMemoryLimit, "more shared memory than an SM has");
static_assert(!split_b_along_k(kConfig) || kConfig.layout == Layout::kDgrad,
              "only MN-major boxes can be halved along K");

// Warps of the first warpgroup; the fourth has nothing to do.
constexpr uint32_t kLoaderWarp = 0;
constexpr uint32_t kSchedulerWarp = 1;
constexpr uint32_t kStoreWarp = 2;

UNIEP_DEVICE void initialise_barriers(Storage& shared) {
  for (int stage = 0; stage < kConfig.pipeline_stages; ++stage) {
    ptx::mbarrier_init(shared.full[stage], 1);
    ptx::mbarrier_init(shared.empty[stage], kMathWarps * kConfig.cluster);
  }
  for (int slot = 0; slot < kTaskSlots; ++slot) {
    ptx::mbarrier_init(shared.tasks.full[slot], 1);
    ptx::mbarrier_init(shared.tasks.empty[slot], kTaskReaders + (lends_stages(kConfig) ? 1 : 0));
  }
  for (uint64_t& put : shared.put) ptx::mbarrier_init(put, kMathWarps);
  ptx::fence_mbarrier_init();
}

UNIEP_DEVICE void join_cta_or_cluster() {
  if constexpr (kConfig.cluster == 1) {
    __syncthreads();
  } else {
    ptx::cluster_barrier();
  }
}

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    uniep_grouped_gemm(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Storage& shared = *reinterpret_cast<Storage*>(memory);
  const uint32_t warp = ptx::warp_uniform(threadIdx.x / ptx::kThreadsPerWarp);
  if (warp == kLoaderWarp && ptx::lane_index() == 0) {
    initialise_barriers(shared);
    ptx::tma_prefetch_map(arguments.common.a);
    ptx::tma_prefetch_map(arguments.b[0]);
  }
  __syncwarp();
  join_cta_or_cluster();

  if (warp < 4) {
    ptx::lower_registers<kGemmProducerRegisters>();
    if (warp == kLoaderWarp) {
      if (ptx::lane_index() == 0) run_loader<kConfig>(arguments.common, arguments.b, shared);
    } else if (warp == kSchedulerWarp) {
      run_scheduler<kConfig>(arguments.common, shared);
    } else if (lends_stages(kConfig) && warp == kStoreWarp) {
      run_lent_store<kConfig>(arguments.common, {arguments.outputs, arguments.b + kConfig.maps}, shared);
    }
  } else {
    ptx::raise_registers<kGemmMathRegisters>();
    run_math<kConfig>(arguments.common, {arguments.outputs, arguments.b + kConfig.maps}, shared,
                      static_cast<int32_t>(warp) - 4);
  }
  __syncwarp();
  // No CTA leaves while its neighbour may still arrive at its barriers.
  if constexpr (kConfig.cluster > 1) join_cta_or_cluster();
}

}  // namespace uniep::cuda
