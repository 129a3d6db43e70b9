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
    if (is_on_) shared_.tile_wait_begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void begins(uint32_t slot) const {
    if (!is_on_) return;
    shared_.tile_times[slot].wait_begin_ns = shared_.tile_wait_begin_ns;
    shared_.tile_times[slot].begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void ends(uint32_t slot) const {
    asm volatile("" : "+r"(slot));  // no register keeps its place in between
    if (is_on_) shared_.tile_times[slot].end_ns = ptx::nanoseconds();
  }

 private:
  LayerStorage<kLayer>& shared_;
  const bool is_on_;
};

// dgrad FC2. No tile of the launch waits for another one of it, so the deferred epilogue of a tile may wait for the
// next.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_first_gradient(LayerStorage<kLayer>& shared, int32_t math_warp) {
  TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster> tasks(shared.tasks);
  Mainloop<kLayer.gemm> mainloop(shared, math_warp / 4);
  const LayerGradient<kLayer> gradient(shared);
  SwigluGradientEpilogue<kLayer.gemm, LayerGradient<kLayer>> epilogue(
      gradient, ptx::uniform_register(ptx::shared_address(shared.staging[math_warp])));
  const TileClock<kLayer> clock(shared, math_warp);
  float d[Mainloop<kLayer.gemm>::kCount];
  for (;;) {
    clock.wait_begins();
    const LayerTask task = tasks.read_by_warp();
    if (__any_sync(0xffffffffu, task.has(LayerTask::kEnd))) break;
    const int32_t row_in_tile = static_cast<int32_t>(ptx::thread_index() / 32 - 4) * kBlockRows;
    WarpTile tile;
    tile.exists = task.has(LayerTask::kStore);
    tile.row = static_cast<int32_t>(ptx::uniform_register(static_cast<uint32_t>(task.row + row_in_tile)));
    tile.column = static_cast<int32_t>(
        ptx::uniform_register(static_cast<uint32_t>(tile.exists ? task.column() : WarpTile::kBeyond)));
    tile.rows = static_cast<int32_t>(ptx::uniform_register(static_cast<uint32_t>(task.valid_rows - row_in_tile)));
    clock.begins(tasks.slot());
    mainloop.multiply(static_cast<int32_t>(ptx::uniform_register(task.k_blocks)), d, epilogue, tile);
    clock.ends(tasks.slot());
    epilogue.finish(tile, d);
    tasks.release_by_warp();
  }
  tasks.release_by_warp();
  epilogue.run_alone(shared, mainloop.cursor());
}

// The weight gradients behind the last tile of dgrad FC1, to the end of the list. Nothing waits for them, so a record's
// slot is handed back as soon as its mainloop is over.
template <LayerKernelConfig kLayer, typename Tasks>
UNIEP_DEVICE void run_filled(LayerStorage<kLayer>& shared, Tasks& tasks,
                             const StageCursor<kLayer.gemm.pipeline_stages>& cursor, int32_t math_warp) {
  constexpr GemmConfig kGemm = filled_gemm(kLayer);
  Mainloop<kGemm> mainloop(filled_storage<kLayer>(shared), math_warp / 4, cursor);
  const FilledOutput<kLayer> output(shared);
  auto epilogue = make_matrix_epilogue<kGemm>(output, filled_storage<kLayer>(shared), math_warp);
  const TileClock<kLayer> clock(shared, math_warp);
  float d[Mainloop<kGemm>::kCount];
  for (bool more = true; more;) {
    clock.wait_begins();
    const LayerTask task = tasks.read_by_warp();
    more = !__any_sync(0xffffffffu, task.has(LayerTask::kEnd));  // the last record has no K blocks
    WarpTile tile;
    tile.exists = task.has(LayerTask::kStore);
    tile.row = task.row + math_warp * kBlockRows;
    tile.column = tile.exists ? task.column() : WarpTile::kBeyond;
    tile.rows = task.valid_rows - math_warp * kBlockRows;
    tile.expert = task.expert;
    tile.gemm = task.has(LayerTask::kSecond) ? 1 : 0;
    const auto k_blocks = static_cast<int32_t>(ptx::uniform_register(task.k_blocks));
    clock.begins(tasks.slot());
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
  // The signal warp stores the last tile from stages whose memory the sums take now.
  if constexpr (lends_stages(kGemm)) wait_for_free_stages<kGemm>(filled_storage<kLayer>(shared), mainloop.cursor());
}

// Two warpgroups, 64 rows of the tile each.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_row_gemms(LayerStorage<kLayer>& shared, int32_t math_warp) {
  TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster> tasks(shared.tasks);
  Mainloop<kLayer.gemm> mainloop(shared, math_warp / 4);
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
    epilogue.begin(tasks.slot());
    mainloop.multiply(k_blocks, d, epilogue, WarpTile{});
    clock.ends(tasks.slot());
    epilogue.finish(tasks.slot(), d);  // reads the record again, which saves the registers
    tasks.release_by_warp();
  }
  if constexpr (kLayer.filled == FilledGradients::kNone) tasks.release_by_warp();
  epilogue.flush();
  if constexpr (kLayer.filled != FilledGradients::kNone) {
    run_filled<kLayer>(shared, tasks, mainloop.cursor(), math_warp);
  }
}

template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_layer_math(LayerStorage<kLayer>& shared, int32_t math_warp) {
  if constexpr (kLayer.gemms == LayerGemms::kFirstGradient) {
    run_first_gradient<kLayer>(shared, math_warp);
  } else {
    run_row_gemms<kLayer>(shared, math_warp);
  }
}

}  // namespace uniep::cuda
