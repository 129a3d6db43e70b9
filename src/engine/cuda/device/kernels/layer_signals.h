#pragma once

#include "engine/cuda/device/epilogue/filled_output.h"
#include "engine/cuda/device/mainloop/lent_stages.h"
#include "engine/cuda/device/schedule/layer_scheduler.h"
#include "engine/cuda/device/transfer/send.h"

namespace uniep::cuda {

// A warp. With the combine in the epilogue the first column tile of dgrad FC1 returns its rows' dprobs: they come with
// the flags of column chunk 0.
UNIEP_DEVICE void return_prob_gradients(const RankCall& call, const LayerTask& task) {
  for (int32_t row = static_cast<int32_t>(ptx::lane_index()); row < task.valid_rows; row += ptx::kThreadsPerWarp) {
    const RowSource source = call.program.rows[task.row + row];
    return_prob_gradient(call, source.rank, source.token, source.slot, task.row + row);
  }
  __syncwarp();
}

struct NothingLent {};

// Stores the launch's fp32 weight gradients, where it has any.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE auto make_lent_store(LayerStorage<kLayer>& shared) {
  if constexpr (lends_stages(filled_gemm(kLayer))) {
    return LentStore<filled_gemm(kLayer), FilledOutput<kLayer>>(filled_storage<kLayer>(shared),
                                                                FilledOutput<kLayer>(shared));
  } else {
    return NothingLent();
  }
}

// One warp: tells what waits for a tile that it is stored. A slot of the task ring is handed back only then, so that
// the math warps are never more than kLayerTaskSlots tiles ahead of the `stored` barriers.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_layer_signals(LayerStorage<kLayer>& shared) {
  const RunningCall running = running_call(shared);
  const RankProgram& p = running.call.program;
  TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster> tasks(shared.tasks);
  [[maybe_unused]] auto lent = make_lent_store<kLayer>(shared);
  for (LayerTask task = tasks.read_by_warp(); !task.has(LayerTask::kEnd); task = tasks.read_by_warp()) {
    if constexpr (lends_stages(filled_gemm(kLayer))) {
      if (task.has(LayerTask::kWgrad)) {
        lent.run(task.k_blocks, task.has(LayerTask::kStore), filled_tile(task));
      } else {
        lent.pass(task.k_blocks);
      }
    }
    ptx::mbarrier_wait(shared.stored[tasks.slot()], tasks.phase(), "tile stored");
    disturb(running, DisturbedAt::kTile);
    if (task.has(LayerTask::kStore)) {
      const bool sent = task.has(LayerTask::kSecond) && !task.has(LayerTask::kWgrad);
      constexpr bool kReturnsProbs = has_second_gradient(kLayer.gemms) && kLayer.combine == CombineKind::kEpilogue;
      if (kReturnsProbs && sent && task.column() == 0) {
        if constexpr (kLayer.gemms == LayerGemms::kGradients) ptx::fence_gpu();  // sums of this launch
        return_prob_gradients(shared.call, task);
      }
      // The rows in peers' slots were written by other warps: they must lie before a flag that another CTA stores.
      if (kLayer.combine == CombineKind::kEpilogue && sent) ptx::fence_system();
      signal_task(running, tile_of<kLayer>(p, task));
      if (is_recorded(running.call) && ptx::lane_index() == 0) {
        write_record(running, AgentRole::kCompute, tile_of<kLayer>(p, task), shared.tile_times[tasks.slot()]);
      }
    }
    tasks.release_by_warp();
  }
  tasks.release_by_warp();
}

}  // namespace uniep::cuda
