#include "tests/cuda/kernel_mutant_tables.h"

namespace uniep::cuda::test {

// What math warps do with their sums.
std::vector<KernelMutant> epilogue_mutants() {
  return {
      {"rows-wait", "epilogue/layer_epilogue.h", R"(      ptx::copy_async_wait<0>();
      __syncwarp();)",
       "      __syncwarp();", "the row table is read before it has come", "epilogue"},
      {"arrival-meets", "epilogue/layer_epilogue.h", R"(    __syncwarp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared_.stored[deferred().slot]);)",
       "    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared_.stored[deferred().slot]);",
       "a warp counts as through before its other lanes have stored", "epilogue", 1,
       "formal: the warp stays together here"},
      {"fragment-meets", "epilogue/layer_epilogue.h", R"(    __syncwarp();
    if (half == 1) write_run(task, done);)",
       "    if (half == 1) write_run(task, done);", "lanes read what other lanes put into shared memory", "epilogue", 1,
       "formal: the warp stays together here"},
      {"gradient-proxy", "epilogue/epilogue_swiglu_gradient.h", R"(    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::lane_index() == 0) {
      const int32_t column = column_ + half * kTransferColumns;)",
       R"(    __syncwarp();
    if (ptx::lane_index() == 0) {
      const int32_t column = column_ + half * kTransferColumns;)",
       "TMA stores dz that ordinary stores have put there", "gradients", 1,
       "asked for by the memory model: ordinary stores are in shared memory before TMA reads it here"},
      {"z-reuse", "epilogue/epilogue_swiglu_gradient.h", R"(      } else {
        ptx::bulk_wait_read<0>();
      })",
       "      }", "z comes into a place that dz has not left", "few-gradients", 1,
       "timing: dz leaves in less time than the next z takes to come"},
      {"z-wait", "epilogue/epilogue_swiglu_gradient.h", R"(    ptx::mbarrier_wait(full(buffer), phase_, "z");)", "",
       "z is read before it has come", "few-gradients", 1, "timing: z comes while products run"},
      {"activation-reuse", "epilogue/epilogue_swiglu_gradient.h", R"(    compute_strip<kLow + 1>(high);
    if (ptx::lane_index() == 0) ptx::bulk_wait_read<1>();)",
       "    compute_strip<kLow + 1>(high);", "a is put where the last one has not left", "few-gradients", 1,
       "timing: a leaves in less time than the next strip's values take"},
      {"last-z-wait", "epilogue/epilogue_swiglu_gradient.h",
       R"(ptx::mbarrier_wait(shared.full[cursor.stage], cursor.phase, "the last z");)", "",
       "the last z is read before it has come", "gradients"},
      {"last-z-empty", "epilogue/last_z.h",
       R"(ptx::mbarrier_wait(shared.empty[cursor.stage], cursor.phase ^ 1, "stage empty");)", "",
       "the last z comes into stages that are in use", "gradients"},
      {"dz-complete", "epilogue/layer_gradient.h", R"(    ptx::bulk_wait_complete<0>();
    if (calls >= 2) arrive(calls - 2);
    ++calls;)",
       R"(    ptx::bulk_wait_read<0>();
    if (calls >= 2) arrive(calls - 2);
    ++calls;)",
       "a tile counts as stored when dz has left, not arrived", "gradients", 1,
       "timing: stores that have left arrive before the signal behind them is seen"},
      {"last-dz-complete", "epilogue/layer_gradient.h", R"(    ptx::bulk_wait_complete<0>();
    if (calls >= 2) arrive(calls - 2);
    if (calls >= 1) arrive(calls - 1);)",
       R"(    ptx::bulk_wait_read<0>();
    if (calls >= 2) arrive(calls - 2);
    if (calls >= 1) arrive(calls - 1);)",
       "the same of the last tile", "gradients", 1,
       "timing: stores that have left arrive before the signal behind them is seen"},
  };
}

}  // namespace uniep::cuda::test
