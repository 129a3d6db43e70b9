#include "tests/cuda/kernel_mutant_tables.h"

namespace uniep::cuda::test {

// Dispatch, sends, sums, and the ring that they copy through.
std::vector<KernelMutant> transfer_mutants() {
  return {
      {"reduce-wait", "transfer/reduce.h", R"(      holds = wait_for(running, task,
                       FlagWait{FlagSpace::kCombined, combined_flag(p, p.rank_of_expert[expert], unit, task.n)});)",
       "      holds = unit >= 0;", "slots are summed that nobody has waited for", "epilogue"},
      {"reduce-proxy", "transfer/reduce.h", "ptx::fence_proxy_async_global();  // a sum may read by bulk copies", "",
       "bulk copies read what ordinary stores have written", "epilogue", 1,
       "rare in a layer: gpu_litmus_tests --weak sees it where bulk loads come from afar"},
      {"group-send-threshold", "transfer/send.h",
       "wait_for(running, task, CounterWait{CounterSpace::kSecondTiles, counter, tiles});",
       "wait_for(running, task, CounterWait{CounterSpace::kSecondTiles, counter, tiles - 1});",
       "groups are summed before the last column tile of FC2", "groups"},
      {"group-send-meets", "transfer/send.h", R"(  sum.finish();
  team.agrees(true);)",
       "  sum.finish();", "a flag is stored before the other lanes' sums", "groups", 1,
       "formal where a team is one warp, which stays together; the exchange kernels have larger teams"},
      {"group-send-proxy", "transfer/copy_agent.h", R"(    ptx::fence_proxy_async_global();
    send_groups)",
       "    send_groups", "bulk copies read what FC2 has stored without TMA", "groups", 1,
       "rare in a layer: gpu_litmus_tests --weak sees it where bulk loads come from afar"},
      {"chunk-wait", "transfer/copy_ring.h", R"(ptx::mbarrier_wait(storage_.full[stage_], phase_, "copied chunk");)",
       "", "a chunk leaves before it has come", "epilogue"},
      {"pieces-wait", "transfer/copy_ring.h", R"(ptx::mbarrier_wait(storage_.full[stage_], phase_, "copied pieces");)",
       "", "summands are added before they have come", "groups"},
      {"ring-reuse", "transfer/copy_ring.h", "ptx::bulk_wait_read<kStoresReading>();", "",
       "a chunk is loaded over one that has not left", "few-staged", 1,
       "timing: a chunk has left before the next one comes, which takes longer"},
      {"stores-complete", "transfer/copy_ring.h", R"(    ptx::bulk_wait_complete<0>();
    __syncwarp();)",
       R"(    ptx::bulk_wait_read<0>();
    __syncwarp();)",
       "a signal tells of bulk stores that have left, not arrived", "staged", 1,
       "timing: stores that have left arrive before the signal behind them is seen"},
      {"pieces-proxy", "transfer/copy_ring.h",
       "ptx::fence_proxy_async_shared();  // what this lane has read of the stage, before bulk copies write there "
       "again",
       "", "a stage is loaded again while it is read", "groups", 1,
       "formal: what was read has been added and stored before"},
      {"rows-fence", "transfer/dispatch.h", "ptx::fence_gpu();  // releases what all lanes have written", "",
       "rows count as full before their padding is zero", "gradients", 1,
       "formal: the counter's release, behind the warp's barrier, covers what its lanes have written"},
      {"padding", "transfer/dispatch.h", "zero_rows(rows, call.hidden, range.end, range.padded_end);", "",
       "padding is what it was", "gradients"},
      {"copy-proxy", "transfer/copy_agent.h",
       "ptx::fence_proxy_async_global();  // bulk copies read what ordinary stores "
       "have written",
       "", "bulk copies read what FC2 has stored without TMA", "staged", 1,
       "rare in a layer: gpu_litmus_tests --weak sees it where bulk loads come from afar"},
      {"copy-wait", "transfer/copy_agent.h", "if (!wait_for_copy<kStage>(running, staged, state)) return false;", "",
       "copies wait for nothing", "staged"},
      {"ring-invalidate", "kernels/layer_copy.h", "if (ptx::lane_index() == 0) invalidate_copy_ring(storage.ring);", "",
       "TMA writes where barriers are", "sms"},
      {"ring-proxy", "kernels/layer_copy.h", R"(  ptx::fence_proxy_async_shared();
  __syncthreads();)",
       "  __syncthreads();", "stages are loaded where ordinary accesses to rings are under way", "sms", 1,
       "formal: those accesses have returned before the barrier"},
      {"math-meets", "kernels/layer_copy.h",
       "ptx::named_barrier(kMathBarrier, kMathWarps * ptx::kThreadsPerWarp);  // nobody multiplies any more", "",
       "rings lie in stages that others still multiply from", "sms"},
      {"stored-wait", "kernels/layer_signals.h",
       R"(ptx::mbarrier_wait(shared.stored[tasks.slot()], tasks.phase(), "tile stored");)", "",
       "tiles count as stored that are not", "epilogue"},
      {"rows-system-fence", "kernels/layer_signals.h",
       "if (kLayer.combine == CombineKind::kEpilogue && sent) ptx::fence_system();", "",
       "another CTA's flag tells of rows in a peer's slots", "epilogue", 2,
       "asked for by the memory model: stores to a peer's memory keep their order here"},
      {"rows-fence-scope", "kernels/layer_signals.h",
       "if (kLayer.combine == CombineKind::kEpilogue && sent) ptx::fence_system();",
       "if (kLayer.combine == CombineKind::kEpilogue && sent) ptx::fence_gpu();",
       "the same, with a fence of too small a scope", "epilogue", 2},
      {"probs-fence", "kernels/layer_signals.h",
       "if constexpr (kLayer.gemms == LayerGemms::kGradients) ptx::fence_gpu();  // sums of this launch", "",
       "dprobs are summed from what L1 has", "gradients", 1,
       "formal: the counter's release, behind the math warps' barrier, covers what they have written"},
  };
}

}  // namespace uniep::cuda::test
