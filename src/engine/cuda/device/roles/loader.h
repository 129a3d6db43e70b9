#pragma once

#include "engine/cuda/device/gemm_arguments.h"
#include "engine/cuda/device/mma/descriptor.h"
#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/ptx/tma.h"
#include "engine/cuda/device/shared_storage.h"

namespace uniep::cuda {

template <GemmConfig kConfig>
constexpr Major kMajorA = kConfig.layout == Layout::kWgrad ? Major::kMN : Major::kK;
template <GemmConfig kConfig>
constexpr Major kMajorB = kConfig.layout == Layout::kForward ? Major::kK : Major::kMN;

// Loads half `half` of a stage's tile of B: for kSwiglu half 0 is gate rows and half 1 the matching up rows.
template <GemmConfig kConfig, bool kMulticast>
UNIEP_DEVICE void load_b_half(SharedStorage<kConfig>& shared, const GemmArguments& arguments, const TensorMap& map,
                              const Task& task, uint32_t stage, int32_t k, int32_t half) {
  constexpr int32_t kHalfColumns = kConfig.tile_n / 2;
  constexpr uint16_t kBothCtas = 3;
  const uint32_t target = ptx::shared_address(shared.b[stage]) + half * (SharedStorage<kConfig>::kOperandBBytes / 2);
  const int32_t third = kConfig.layout == Layout::kWgrad || arguments.map_per_expert != 0 ? 0 : task.expert;
  const auto load = [&](uint32_t address, int32_t c0, int32_t c1) {
    if constexpr (kMulticast) {
      ptx::tma_load_3d_multicast(address, map, shared.full[stage], kBothCtas, c0, c1, third);
    } else {
      ptx::tma_load_3d(address, map, shared.full[stage], c0, c1, third);
    }
  };
  if constexpr (kMajorB<kConfig> == Major::kK) {
    int32_t n;
    if constexpr (kConfig.epilogue == Epilogue::kSwiglu) {
      n = task.n_block * kHalfColumns + half * arguments.n_extent;
    } else {
      n = task.n_block * kConfig.tile_n + half * kHalfColumns;
    }
    load(target, k, n);
  } else {
    const int32_t n = task.n_block * kConfig.tile_n + half * kHalfColumns;
#pragma unroll
    for (int32_t box = 0; box < kHalfColumns / static_cast<int32_t>(kBoxColumns); ++box) {
      load(target + box * kBoxBytes, n + box * static_cast<int32_t>(kBoxColumns), task.k_begin + k);
    }
  }
}

template <GemmConfig kConfig>
UNIEP_DEVICE void load_a(SharedStorage<kConfig>& shared, const GemmArguments& arguments, const Task& task,
                         uint32_t stage, int32_t k) {
  const uint32_t target = ptx::shared_address(shared.a[stage]);
  if constexpr (kMajorA<kConfig> == Major::kK) {
    ptx::tma_load_3d(target, arguments.a, shared.full[stage], k, task.m_begin, 0);
  } else {
#pragma unroll
    for (int32_t box = 0; box < kTileM / static_cast<int32_t>(kBoxColumns); ++box) {
      ptx::tma_load_3d(target + box * kBoxBytes, arguments.a, shared.full[stage],
                       task.m_begin + box * static_cast<int32_t>(kBoxColumns), task.k_begin + k, 0);
    }
  }
}

// One thread: keeps the stages full. Every stage of every CTA receives the same number of bytes, whoever sends them.
template <GemmConfig kConfig>
UNIEP_DEVICE void run_loader(const GemmArguments& arguments, const TensorMap* b_maps, SharedStorage<kConfig>& shared) {
  const int32_t cta = kConfig.cluster == 1 ? 0 : static_cast<int32_t>(ptx::cluster_rank());
  TaskCursor tasks(shared.tasks);
  StageCursor<kConfig.stages> cursor;
  for (Task task = tasks.take(); !task.has(Task::kEnd); task = tasks.take()) {
    const TensorMap& b_map = b_maps[arguments.map_per_expert != 0 ? task.expert : 0];
    for (int32_t block = 0; block < task.k_blocks; ++block, cursor.advance()) {
      const int32_t k = block * kTileK;
      ptx::mbarrier_wait(shared.empty[cursor.stage], cursor.phase ^ 1, "stage empty");
      ptx::mbarrier_arrive_expect_bytes(shared.full[cursor.stage], stage_bytes(kConfig));
      load_a<kConfig>(shared, arguments, task, cursor.stage, k);
      if (kConfig.cluster == 2 && task.has(Task::kSharedB)) {
        load_b_half<kConfig, true>(shared, arguments, b_map, task, cursor.stage, k, cta);
      } else {
        load_b_half<kConfig, false>(shared, arguments, b_map, task, cursor.stage, k, 0);
        load_b_half<kConfig, false>(shared, arguments, b_map, task, cursor.stage, k, 1);
      }
    }
  }
}

}  // namespace uniep::cuda
