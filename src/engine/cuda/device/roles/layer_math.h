#pragma once

#include "engine/cuda/device/roles/layer_epilogue.h"
#include "engine/cuda/device/roles/layer_scheduler.h"
#include "engine/cuda/device/roles/math.h"

namespace uniep::cuda {

// When a CTA's tiles ran, by one thread: between asking for the tile and having it, and until its products are there.
template <LayerKernelConfig kLayer>
class TileRecorder {
 public:
  UNIEP_DEVICE TileRecorder(LayerStorage<kLayer>& shared, bool records)
      : shared_(shared), records_(records && shared.call.records != nullptr) {
    if (records_) shared_.records = shared_.call.record_counts[agent()];
  }

  UNIEP_DEVICE void wait_begins() {
    if (records_) shared_.tile_wait_begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void begins() {
    if (records_) shared_.tile_begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void ends(uint32_t slot) {
    if (!records_) return;
    const LayerTask task = shared_.tasks.slots[slot];
    if (!task.has(LayerTask::kStore)) return;
    const RankCall& call = shared_.call;
    TileRecord record;
    record.task = tile_of<kLayer>(call.program, task);
    record.launch = static_cast<uint32_t>(shared_.launch);
    record.reserved = 0;
    record.wait_begin_ns = shared_.tile_wait_begin_ns;
    record.begin_ns = shared_.tile_begin_ns;
    record.end_ns = ptx::nanoseconds();
    call.records[agent() * static_cast<int64_t>(call.record_capacity) + shared_.records % call.record_capacity] =
        record;
    call.record_counts[agent()] = ++shared_.records;
  }

 private:
  UNIEP_DEVICE int32_t agent() const { return shared_.worker * 2 + static_cast<int32_t>(AgentRole::kCompute); }

  LayerStorage<kLayer>& shared_;
  const bool records_;
};

// Two warpgroups, 64 rows of the tile each.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_layer_math(LayerStorage<kLayer>& shared, int32_t math_warp) {
  TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster> tasks(shared.tasks);
  Multiplier<kLayer.gemm> multiplier(shared, math_warp / 4);
  LayerEpilogue<kLayer> epilogue(shared, math_warp);
  TileRecorder<kLayer> recorder(shared, math_warp == 0 && ptx::lane_index() == 0);
  float d[Multiplier<kLayer.gemm>::kCount];
  for (;;) {
    recorder.wait_begins();
    if (!tasks.ready()) epilogue.flush();
    const LayerTask task = tasks.read_by_warp();
    if (task.has(LayerTask::kEnd)) break;
    recorder.begins();
    multiplier.multiply(task.k_blocks, d, epilogue, WarpTile{});
    recorder.ends(tasks.slot());
    epilogue.finish(tasks.slot(), d);  // reads the record again, which saves the registers
    tasks.release_by_warp();
  }
  tasks.release_by_warp();
  epilogue.flush();
}

}  // namespace uniep::cuda
