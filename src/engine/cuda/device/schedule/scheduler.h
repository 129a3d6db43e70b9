#pragma once

#include "engine/cuda/device/arguments/gemm_arguments.h"
#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/shared_memory/shared_storage.h"
#include "program/tile_order.h"

namespace uniep::cuda {

// Finds the expert of a task. Tasks are asked for in ascending order; each lane holds one of 32 experts.
template <GemmConfig kConfig>
class ExpertSearch {
 public:
  UNIEP_DEVICE ExpertSearch(const GemmArguments& arguments, int32_t n_blocks)
      : arguments_(arguments), n_blocks_(n_blocks) {
    load(0);
  }

  // False when there are no such experts. On return the fields below describe the task's expert.
  UNIEP_DEVICE bool find(int32_t task) {
    while (task - first_task_ >= chunk_tasks_) {
      if (chunk_ + 32 >= arguments_.experts) return false;
      first_task_ += chunk_tasks_;
      load(chunk_ + 32);
    }
    const int32_t wanted = task - first_task_;
    const int32_t lane = __ffs(__ballot_sync(0xffffffffu, wanted < inclusive_)) - 1;
    expert = chunk_ + lane;
    rows = __shfl_sync(0xffffffffu, rows_, lane);
    segment = __shfl_sync(0xffffffffu, segment_, lane);
    const int32_t end = __shfl_sync(0xffffffffu, inclusive_, lane);
    task_in_expert = wanted - (end - __shfl_sync(0xffffffffu, tasks_, lane));
    return true;
  }

  int32_t expert = 0;
  int32_t rows = 0;
  int32_t segment = 0;
  int32_t task_in_expert = 0;

 private:
  UNIEP_DEVICE void load(int32_t chunk) {
    chunk_ = chunk;
    const int32_t mine = chunk + static_cast<int32_t>(ptx::lane_index());
    const bool exists = mine < arguments_.experts;
    rows_ = exists ? arguments_.row_count[mine] : 0;
    segment_ = exists ? arguments_.segment_start[mine] : 0;
    int32_t m_rows = rows_;
    if constexpr (kConfig.layout == Layout::kWgrad) {
      // An expert without rows still has a gradient to clear, but nothing to add.
      const bool skipped = !exists || (kConfig.epilogue == Epilogue::kAccumulate && rows_ == 0);
      m_rows = skipped ? 0 : arguments_.m_extent;
    }
    tasks_ = task_count((m_rows + kTileM - 1) / kTileM, n_blocks_, kConfig.cluster);
    inclusive_ = tasks_;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, inclusive_, distance);
      if (static_cast<int32_t>(ptx::lane_index()) >= distance) inclusive_ += before;
    }
    chunk_tasks_ = __shfl_sync(0xffffffffu, inclusive_, 31);
  }

  const GemmArguments& arguments_;
  const int32_t n_blocks_;
  int32_t chunk_ = 0;
  int32_t first_task_ = 0;
  int32_t chunk_tasks_ = 0;
  int32_t rows_ = 0;
  int32_t segment_ = 0;
  int32_t tasks_ = 0;
  int32_t inclusive_ = 0;
};

// One warp: decides what its CTA does next, up to kTaskSlots tasks ahead. No other role evaluates order.
template <GemmConfig kConfig>
UNIEP_DEVICE void run_scheduler(const GemmArguments& arguments, SharedStorage<kConfig>& shared) {
  constexpr int32_t kColumns = kConfig.epilogue == Epilogue::kSwiglu ? kConfig.tile_n / 2 : kConfig.tile_n;
  const int32_t n_blocks = (arguments.n_extent + kColumns - 1) / kColumns;
  const int32_t cta = kConfig.cluster == 1 ? 0 : static_cast<int32_t>(ptx::cluster_rank());
  const int32_t clusters = static_cast<int32_t>(gridDim.x) / kConfig.cluster;
  ExpertSearch<kConfig> search(arguments, n_blocks);
  TaskCursor cursor(shared.tasks);
  const bool runs = arguments.failed == nullptr || *arguments.failed == 0;
  for (int32_t index = static_cast<int32_t>(blockIdx.x) / kConfig.cluster; runs && search.find(index);
       index += clusters) {
    constexpr bool kIsWgrad = kConfig.layout == Layout::kWgrad;
    const int32_t m_rows = kIsWgrad ? arguments.m_extent : search.rows;
    const int32_t m_blocks = (m_rows + kTileM - 1) / kTileM;
    const TilePosition tile =
        tile_of_task(search.task_in_expert, cta, {m_blocks, n_blocks, kConfig.cluster, arguments.raster});
    const int32_t rows_left = m_rows - tile.m_block * kTileM;
    const int32_t k_extent = kIsWgrad ? search.rows : arguments.k_extent;
    Task task;
    task.m_begin = tile.m_block * kTileM + (kIsWgrad ? 0 : search.segment);
    task.n_block = static_cast<uint16_t>(tile.n_block);
    const int32_t k_blocks = (k_extent + kTileK - 1) / kTileK;
    constexpr int32_t kMinBlocks = kIsWgrad ? 0 : interleaved_blocks(kConfig);
    task.k_blocks = static_cast<uint16_t>(k_blocks < kMinBlocks ? kMinBlocks : k_blocks);
    task.k_begin = kIsWgrad ? search.segment : 0;
    task.expert = static_cast<uint16_t>(search.expert);
    task.valid_rows = static_cast<uint8_t>(rows_left < kTileM ? rows_left : kTileM);
    task.flags = static_cast<uint8_t>((tile.shared_b ? Task::kSharedB : 0) | (tile.exists ? Task::kStore : 0));
    if (ptx::lane_index() == 0) cursor.publish(task);
    __syncwarp();
  }
  Task end{};
  end.flags = Task::kEnd;
  if (ptx::lane_index() == 0) cursor.publish(end);
}

}  // namespace uniep::cuda
