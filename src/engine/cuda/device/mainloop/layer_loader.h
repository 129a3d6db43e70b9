#pragma once

#include "engine/cuda/device/epilogue/filled_output.h"
#include "engine/cuda/device/mainloop/loader.h"
#include "engine/cuda/device/shared_memory/layer_storage.h"

namespace uniep::cuda {

// FC1: the first half of a tile of B is gate rows, the second the matching up rows. dgrad FC1: K is gate rows, then up
// rows. Without a gate both are as plain as FC2.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE TileOperands operands_of(const RankCall& maps, const RankCall& call, const LayerTask& task) {
  const bool second = task.has(LayerTask::kSecond);
  const bool map_per_expert = (second ? call.second_map_per_expert : call.first_map_per_expert) != 0;
  const TensorMap* const b = second ? call.second_b : call.first_b;
  TileOperands tile;
  tile.a = second ? &maps.second_a : &maps.first_a;
  tile.b = map_per_expert ? b + task.expert : b;
  tile.b_matrix = map_per_expert ? 0 : task.expert;
  tile.m_begin = task.row;
  tile.n_low = task.column();
  const bool gate_and_up = kHasGateAndUp<kLayer> && !second;
  const int32_t width = second ? kLayer.gemm.tile_n : first_gemm(kLayer).tile_n;
  tile.n_high = task.column() + (gate_and_up ? call.up_row : width / 2);
  if (gate_and_up) tile.up_maps = call.up_maps;
  if constexpr (has_second_gradient(kLayer.gemms)) {
    tile.up_maps = call.up_maps;
    tile.gate_depth = call.gate_depth;
  }
  tile.k_begin = 0;
  tile.k_blocks = task.k_blocks;
  tile.shared_b = task.has(LayerTask::kSharedB);
  return tile;
}

template <LayerKernelConfig kLayer>
UNIEP_DEVICE TileOperands wgrad_operands_of(const RankCall& call, const LayerTask& task) {
  const bool of_w1 = task.has(LayerTask::kSecond);
  const TensorMap* const maps = call.gradient_maps + kFirstWgradMap + (of_w1 ? 2 : 0);
  TileOperands tile;
  tile.a = maps;
  tile.b = maps + 1;
  tile.b_matrix = 0;
  tile.m_begin = task.row;
  tile.n_low = task.column();
  tile.n_high = task.column() + kLayer.gemm.tile_n / 2;
  tile.k_begin = task.m_block * kRowAlignment;
  tile.k_blocks = task.k_blocks;
  tile.shared_b = task.has(LayerTask::kSharedB);
  return tile;
}

// K blocks before a tile's last one at which the next tile is dealt: so long may its ticket and its waits take, and as
// long as the stages last.
constexpr int32_t kBlocksToDeal = 16;

// Behind dgrad FC2's last tile: its z, and then the memory is dgrad FC1's, as soon as the math warps of both CTAs have
// handed back the stages of that z.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void load_turn(LayerStorage<kLayer>& shared, StageCursor<kLayer.gemm.pipeline_stages>& cursor, int32_t row,
                            int32_t column) {
  constexpr GemmConfig kGemm = first_gemm(kLayer);
  load_last_z<kGemm>(shared.call.gradient_maps[0], first_storage<kLayer>(shared), cursor, row, column);
  wait_for_free_stages<kGemm>(first_storage<kLayer>(shared), cursor);
  ptx::fence_gpu();
}

// One thread: keeps the stages full. `maps` is the call in global memory, where TMA finds its maps.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_layer_loader(const RankCall& maps, LayerStorage<kLayer>& shared) {
  const int32_t cta = kLayer.gemm.cluster == 1 ? 0 : static_cast<int32_t>(ptx::cluster_rank());
  TaskCursor<typename LayerStorage<kLayer>::Tasks, kLayer.gemm.cluster> tasks(shared.tasks);
  StageCursor<kLayer.gemm.pipeline_stages> cursor;
  [[maybe_unused]] int32_t last_row = 0, last_column = WarpTile::kBeyond;
  for (LayerTask task = tasks.take(); !task.has(LayerTask::kEnd); task = tasks.take()) {
    if constexpr (kLayer.gemms == LayerGemms::kGradients) {
      if (task.has(LayerTask::kTurn)) {
        load_turn<kLayer>(shared, cursor, last_row, last_column);
        continue;
      }
    }
    // The scheduler may deal the next tile. No earlier than it must: of the last tiles of a list others would get too
    // few.
    const int32_t deals_at = task.k_blocks > kBlocksToDeal ? task.k_blocks - kBlocksToDeal : 0;
    const auto before = [&](int32_t block) {
      disturb(running_call(shared), DisturbedAt::kTile);
      if (block == deals_at) ptx::mbarrier_arrive(shared.deal);
    };
    if (task.k_blocks == 0) before(0);
    // The scheduler has seen the signals of the rows of A; they were written without TMA.
    ptx::fence_proxy_async_global();
    if constexpr (kLayer.filled != FilledGradients::kNone) {
      if (task.has(LayerTask::kWgrad)) {
        constexpr GemmConfig kGemm = filled_gemm(kLayer);
        load_tile<kGemm>(filled_storage<kLayer>(shared), cursor, wgrad_operands_of<kLayer>(shared.call, task), cta,
                         before);
        if constexpr (lends_stages(kGemm)) {
          if (task.k_blocks > 0) {
            lend_stages(filled_storage<kLayer>(shared), cursor, FilledOutput<kLayer>(shared),
                        task.has(LayerTask::kStore), filled_tile(task));
          }
        }
        continue;
      }
    }
    if constexpr (kLayer.gemms == LayerGemms::kGradients) {
      if (task.has(LayerTask::kSecond)) {
        load_tile<kLayer.gemm>(shared, cursor, operands_of<kLayer>(maps, shared.call, task), cta, before);
        continue;
      }
    }
    load_tile<first_gemm(kLayer)>(first_storage<kLayer>(shared), cursor, operands_of<kLayer>(maps, shared.call, task),
                                  cta, before);
    last_row = task.row;
    last_column = task.has(LayerTask::kStore) ? task.column() : WarpTile::kBeyond;
  }
  if constexpr (kLayer.gemms == LayerGemms::kFirstGradient) {
    load_last_z<kLayer.gemm>(shared.call.gradient_maps[0], shared, cursor, last_row, last_column);
  }
}

}  // namespace uniep::cuda
