#include "tests/cuda/kernel_mutant_tables.h"

namespace uniep::cuda::test {

// The pipeline and its barriers, the task ring, what the roles of a CTA and the CTAs of a cluster tell each other.
std::vector<KernelMutant> mainloop_mutants() {
  return {
      {"empty-count", "kernels/megakernel.cu",
       "ptx::mbarrier_init(shared.empty[stage], kMathWarps * kLayer.gemm.cluster);",
       "ptx::mbarrier_init(shared.empty[stage], kMathWarps);", "half of the math warps hand a stage back", "epilogue"},
      {"stored-count", "kernels/megakernel.cu", "ptx::mbarrier_init(shared.stored[slot], kMathWarps);",
       "ptx::mbarrier_init(shared.stored[slot], kMathWarps / 2);", "a tile counts as stored when half of it is",
       "epilogue"},
      {"task-readers", "kernels/megakernel.cu",
       "ptx::mbarrier_init(shared.tasks.empty[slot], kLayerTaskReaders * kLayer.gemm.cluster);",
       "ptx::mbarrier_init(shared.tasks.empty[slot], kLayerTaskReaders);", "half of the readers hand a record back",
       "epilogue"},
      {"stage-empty", "mainloop/loader.h",
       R"(ptx::mbarrier_wait(shared.empty[cursor.stage], cursor.phase ^ 1, "stage empty");)", "",
       "stages are loaded that are in use", "epilogue"},
      {"stage-full", "mainloop/math.h", R"(ptx::mbarrier_wait(shared_.full[stage], cursor_.phase, "stage full");)", "",
       "stages are multiplied that are not there", "epilogue"},
      {"stage-released-first", "mainloop/math.h", R"(      wgmma_wait<1>();
      if constexpr (!kFirst) release_stage<kConfig>(shared_, previous_);)",
       R"(      if constexpr (!kFirst) release_stage<kConfig>(shared_, previous_);
      wgmma_wait<1>();)",
       "a stage goes back before its products are done", "epilogue", 1,
       "timing: the next load comes after the products that still read, which take less"},
      {"gradient-stage-released-first", "mainloop/math.h", R"(      wgmma_wait<0>();
      release_stage<kConfig>(shared_, previous_);
    })",
       R"(      release_stage<kConfig>(shared_, previous_);
      wgmma_wait<0>();
    })",
       "the same in weight gradients", "gradients"},
      {"products-wait", "mainloop/math.h", R"(    wgmma_wait<0>();
    pin_registers(d);
    release_stage)",
       R"(    pin_registers(d);
    release_stage)",
       "a tile's sums are read before its last products", "epilogue", 1,
       "the assembler itself waits behind each product where it finds sums read without a wait"},
      {"operands-proxy", "mainloop/layer_loader.h",
       R"(    // The scheduler has seen the signals of the rows of A; they were written without TMA.
    ptx::fence_proxy_async_global();)",
       "", "TMA loads what FC1 has stored without it", "epilogue", 1,
       "rare in a layer: gpu_litmus_tests --weak sees it where bulk loads come from afar"},
      {"turn-wait", "mainloop/layer_loader.h", R"(  wait_for_free_stages<kGemm>(first_storage<kLayer>(shared), cursor);
  ptx::fence_gpu();)",
       "  ptx::fence_gpu();", "dgrad FC1 loads over the last z of dgrad FC2", "gradients"},
      {"hand-over-fences", "mainloop/layer_math.h", R"(  ptx::fence_proxy_async_shared();
  ptx::fence_gpu();  // a hand-back orders no ordinary accesses)",
       "", "dSwiGLU's memory is loaded while ordinary accesses are under way", "gradients", 1,
       "asked for by the memory model: those accesses have returned before the hand-over"},
      {"staging-invalidate", "mainloop/layer_math.h", "epilogue.leave();", "", "TMA writes where barriers are",
       "gradients"},
      {"lent-stage-free", "mainloop/lent_stages.h", "if (ptx::lane_index() == 0) ptx::bulk_wait_read<kNewer>();", "",
       "a lent stage goes back before it has left", "gradients"},
      {"lent-proxy", "mainloop/lent_stages.h", R"(        put<kStage, 0>(d, stage);
        ptx::fence_proxy_async_shared();)",
       "        put<kStage, 0>(d, stage);", "TMA stores sums that ordinary stores have put there", "gradients", 1,
       "asked for by the memory model: ordinary stores are in shared memory before TMA reads it here"},
      {"lent-put", "mainloop/lent_stages.h",
       R"(ptx::mbarrier_wait(shared_.put[stage_], parities_ >> stage_ & 1, "stage put");)", "",
       "a lent stage leaves before the sums are in it", "gradients"},
      {"lent-stage", "mainloop/lent_stages.h",
       R"(ptx::mbarrier_wait(shared_.full[stage], cursor.phase, "stage lent");)", "",
       "sums are put into stages that are not lent yet", "gradients"},
      {"record-empty", "shared_memory/task.h",
       R"(ptx::mbarrier_wait(ring_.empty[slot_], phase_ ^ 1, "task slot empty");)", "",
       "a record is written over one that is in use", "few"},
      {"record-full", "shared_memory/task.h", R"(  UNIEP_DEVICE Record read_by_warp() {
    ptx::mbarrier_wait(ring_.full[slot_], phase_, "task slot full");)",
       "  UNIEP_DEVICE Record read_by_warp() {", "records are read that are not there", "epilogue"},
      {"record-order", "shared_memory/task.h", R"(      ptx::mbarrier_arrive_expect_bytes_remote(full, sizeof(Record));
      ptx::store_async_16(ptx::cluster_address(ptx::shared_address(&ring_.records[slot_]), cta),
                          __builtin_bit_cast(ptx::Vector16, record), full);)",
       R"(      ptx::store_async_16(ptx::cluster_address(ptx::shared_address(&ring_.records[slot_]), cta),
                          __builtin_bit_cast(ptx::Vector16, record), full);
      ptx::mbarrier_arrive_expect_bytes_remote(full, sizeof(Record));)",
       "a record's bytes are announced behind it", "epilogue", 1,
       "a phase ends with its last arrival, and this one brings the bytes"},
  };
}

}  // namespace uniep::cuda::test
