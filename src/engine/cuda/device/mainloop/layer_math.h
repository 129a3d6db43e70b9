#pragma once

#include "engine/cuda/device/epilogue/filled_output.h"
#include "engine/cuda/device/epilogue/layer_epilogue.h"
#include "engine/cuda/device/epilogue/layer_gradient.h"
#include "engine/cuda/device/mainloop/math.h"
#include "engine/cuda/device/schedule/layer_scheduler.h"

namespace uniep::cuda {

// One thread writes down when the tiles of a CTA ran: from asking for a tile to having it, and until its mainloop is
// over. The signal warp, which has registers left, passes it on.
template <LayerKernelConfig kLayer>
class TileClock {
 public:
  UNIEP_DEVICE TileClock(LayerStorage<kLayer>& shared, int32_t math_warp)
      : shared_(shared), is_on_(is_recorded(shared.call) && math_warp == 0 && ptx::lane_index() == 0) {}

  UNIEP_DEVICE void wait_begins() const {
    if (is_on()) shared_.tile_wait_begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void begins(uint32_t slot) const {
    if (!is_on()) return;
    shared_.tile_times[slot].wait_begin_ns = shared_.tile_wait_begin_ns;
    shared_.tile_times[slot].begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void ends(uint32_t slot) const {
    asm volatile("" : "+r"(slot));  // no register keeps its place in between
    if (is_on()) shared_.tile_times[slot].end_ns = ptx::nanoseconds();
  }

 private:
  // With all GEMMs of backward in one kernel no predicate is left to keep it in.
  UNIEP_DEVICE bool is_on() const {
    if constexpr (kLayer.gemms != LayerGemms::kGradients) return is_on_;
    return is_recorded(shared_.call) && ptx::thread_index() == kMathThread;
  }

  static constexpr uint32_t kMathThread = kGemmThreads - kMathWarps * ptx::kThreadsPerWarp;
  LayerStorage<kLayer>& shared_;
  const bool is_on_;
};

// Behind dgrad FC2's last tile: this warp no longer uses the memory as dgrad FC2 does. The loaders of both CTAs wait
// for the stages of the last z, from all math warps.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void hand_over(LayerStorage<kLayer>& shared, StageCursor<kLayer.gemm.pipeline_stages>& cursor) {
  constexpr GemmConfig kGemm = first_gemm(kLayer);
  ptx::fence_proxy_async_shared();
  ptx::fence_gpu();  // a hand-back orders no ordinary accesses
  __syncwarp();
#pragma unroll 1
  for (int chunk = 0; chunk < kGemm.tile_n / kProbColumns; ++chunk, cursor.advance()) {
    release_stage<kGemm>(first_storage<kLayer>(shared), cursor.stage);
  }
}

// dgrad FC2. None of its tiles waits for another one, so the deferred epilogue of a tile may wait for the next. That of
// the last one is done alone, where the list ends or turns to dgrad FC1.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_first_gradient(LayerStorage<kLayer>& shared,
                                     TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster>& tasks,
                                     StageCursor<kLayer.gemm.pipeline_stages>& cursor, int32_t math_warp) {
  constexpr GemmConfig kGemm = first_gemm(kLayer);
  constexpr bool kTurns = kLayer.gemms == LayerGemms::kGradients;
  auto& storage = first_storage<kLayer>(shared);
  Mainloop<kGemm> mainloop(storage, math_warp / 4);
  const LayerGradient<kLayer> gradient(shared);
  SwigluGradientEpilogue<kGemm, LayerGradient<kLayer>> epilogue(
      gradient, ptx::uniform_register(ptx::shared_address(storage.staging[math_warp])));
  const TileClock<kLayer> clock(shared, math_warp);
  float d[Mainloop<kGemm>::kCount];
  for (;;) {
    clock.wait_begins();
    const LayerTask task = tasks.read_by_warp();
    if (__any_sync(0xffffffffu, task.has(kTurns ? LayerTask::kTurn : LayerTask::kEnd))) break;
    const int32_t row_in_tile = static_cast<int32_t>(ptx::thread_index() / 32 - 4) * kBlockRows;
    WarpTile tile;
    tile.exists = task.has(LayerTask::kStore);
    tile.row = static_cast<int32_t>(ptx::uniform_register(static_cast<uint32_t>(task.row + row_in_tile)));
    tile.column = static_cast<int32_t>(
        ptx::uniform_register(static_cast<uint32_t>(tile.exists ? task.column() : WarpTile::kBeyond)));
    tile.rows = static_cast<int32_t>(ptx::uniform_register(static_cast<uint32_t>(task.valid_rows - row_in_tile)));
    clock.begins(tasks.slot());
    disturb(running_call(shared), DisturbedAt::kTile);
    mainloop.multiply(static_cast<int32_t>(ptx::uniform_register(task.k_blocks)), d, epilogue, tile);
    clock.ends(tasks.slot());
    epilogue.finish(tile, d);
    tasks.release_by_warp();
  }
  if constexpr (!kTurns) tasks.release_by_warp();
  epilogue.run_alone(storage, mainloop.cursor());
  if constexpr (kTurns) {
    epilogue.leave();
    cursor = mainloop.cursor();
    hand_over<kLayer>(shared, cursor);
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.stored[tasks.slot()]);
    tasks.release_by_warp();
  }
}

// A run of weight gradients: behind the last tile of dgrad FC1, to the end of the list, or before its first one.
// Nothing waits for them, so a record's slot is handed back as soon as its mainloop is over.
template <LayerKernelConfig kLayer, bool kBeforeDgrad, typename Tasks>
UNIEP_DEVICE void run_filled(LayerStorage<kLayer>& shared, Tasks& tasks,
                             StageCursor<kLayer.gemm.pipeline_stages>& cursor, int32_t math_warp) {
  constexpr GemmConfig kGemm = filled_gemm(kLayer);
  Mainloop<kGemm> mainloop(filled_storage<kLayer>(shared), math_warp / 4, cursor);
  const FilledOutput<kLayer> output(shared);
  auto epilogue = make_matrix_epilogue<kGemm>(output, filled_storage<kLayer>(shared), math_warp);
  const TileClock<kLayer> clock(shared, math_warp);
  float d[Mainloop<kGemm>::kCount];
  if constexpr (kLayer.mixed) {  // else the compiler keeps what is not defined yet from one of its two places to the
                                 // other
#pragma unroll
    for (int i = 0; i < Mainloop<kGemm>::kCount; ++i) d[i] = 0.0f;
  }
  for (bool more = true; more;) {
    clock.wait_begins();
    const LayerTask task = tasks.read_by_warp();
    if constexpr (kBeforeDgrad) {
      more = __any_sync(0xffffffffu, task.has(LayerTask::kWgrad));  // another record is left for the next loop
      if (!more) break;
    } else {
      more = !__any_sync(0xffffffffu, task.has(LayerTask::kEnd));  // the last record has no K blocks
    }
    WarpTile tile;
    tile.exists = task.has(LayerTask::kStore);
    tile.row = task.row + math_warp * kBlockRows;
    tile.column = tile.exists ? task.column() : WarpTile::kBeyond;
    tile.rows = task.valid_rows - math_warp * kBlockRows;
    tile.expert = task.expert;
    tile.gemm = task.has(LayerTask::kSecond) ? 1 : 0;
    const auto k_blocks = static_cast<int32_t>(ptx::uniform_register(task.k_blocks));
    clock.begins(tasks.slot());
    disturb(running_call(shared), DisturbedAt::kTile);
    mainloop.multiply(k_blocks, d, epilogue, tile);
    clock.ends(tasks.slot());
    if (tile.exists && k_blocks == 0) {
      if (kLayer.filled != FilledGradients::kAccumulate) clear_tile<kGemm>(output, tile);
      tile.exists = false;
    }
    if constexpr (lends_stages(kGemm)) {
      if (k_blocks > 0) epilogue.finish(tile, d, mainloop.cursor());
    } else {
      epilogue.finish(tile, d);
    }
    if (more && ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.stored[tasks.slot()]);
    tasks.release_by_warp();
  }
  if constexpr (kBeforeDgrad) {
    if constexpr (!lends_stages(kGemm)) mainloop.multiply(0, d, epilogue, WarpTile{});  // what the last tile left over
    cursor = mainloop.cursor();
    return;
  }
  // The signal warp stores the last tile from stages whose memory the sums take now.
  if constexpr (lends_stages(kGemm)) wait_for_free_stages<kGemm>(filled_storage<kLayer>(shared), mainloop.cursor());
}

// Two warpgroups, 64 rows of the tile each.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_row_gemms(LayerStorage<kLayer>& shared,
                                TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster>& tasks,
                                StageCursor<kLayer.gemm.pipeline_stages>& cursor, int32_t math_warp) {
  Mainloop<kLayer.gemm> mainloop(shared, math_warp / 4, cursor);
  LayerEpilogue<kLayer> epilogue(shared, math_warp);
  const TileClock<kLayer> clock(shared, math_warp);
  float d[Mainloop<kLayer.gemm>::kCount];
  for (;;) {
    clock.wait_begins();
    if (!tasks.ready()) epilogue.flush();
    const LayerTask task = tasks.read_by_warp();
    if (__any_sync(0xffffffffu, task.has(LayerTask::kEnd | LayerTask::kWgrad))) break;
    const auto k_blocks = static_cast<int32_t>(ptx::uniform_register(task.k_blocks));
    clock.begins(tasks.slot());
    disturb(running_call(shared), DisturbedAt::kTile);
    epilogue.begin(tasks.slot());
    mainloop.multiply(k_blocks, d, epilogue, WarpTile{});
    clock.ends(tasks.slot());
    epilogue.finish(tasks.slot(), d);  // reads the record again, which saves the registers
    tasks.release_by_warp();
  }
  if constexpr (kLayer.filled == FilledGradients::kNone) tasks.release_by_warp();
  epilogue.flush();
  if constexpr (kLayer.filled != FilledGradients::kNone) {
    run_filled<kLayer, false>(shared, tasks, mainloop.cursor(), math_warp);
  }
}

template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_layer_math(LayerStorage<kLayer>& shared, int32_t math_warp) {
  TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster> tasks(shared.tasks);
  StageCursor<kLayer.gemm.pipeline_stages> cursor;
  if constexpr (has_first_gradient(kLayer.gemms)) run_first_gradient<kLayer>(shared, tasks, cursor, math_warp);
  if constexpr (kLayer.mixed) run_filled<kLayer, true>(shared, tasks, cursor, math_warp);
  if constexpr (kLayer.gemms != LayerGemms::kFirstGradient) run_row_gemms<kLayer>(shared, tasks, cursor, math_warp);
}

}  // namespace uniep::cuda
