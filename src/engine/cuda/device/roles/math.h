#pragma once

#include "engine/cuda/device/mma/wgmma.h"
#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/roles/epilogue_swiglu.h"
#include "engine/cuda/device/roles/loader.h"

namespace uniep::cuda {

// Hands a stage back to the loaders that fill it: each math warp tells every CTA of the cluster.
template <GemmConfig kConfig>
UNIEP_DEVICE void release_stage(SharedStorage<kConfig>& shared, uint32_t stage) {
  const uint32_t lane = ptx::lane_index();
  if constexpr (kConfig.cluster == 1) {
    if (lane == 0) ptx::mbarrier_arrive(shared.empty[stage]);
  } else {
    if (lane < static_cast<uint32_t>(kConfig.cluster)) ptx::mbarrier_arrive_remote(shared.empty[stage], lane);
  }
}

// One chain from zero along K ascending; one group of four wgmma stays in flight while the next stage is awaited.
template <GemmConfig kConfig, int kCount>
UNIEP_DEVICE void multiply_tile(SharedStorage<kConfig>& shared, StageCursor<kConfig.stages>& cursor,
                                int32_t warpgroup, int32_t k_blocks, float (&d)[kCount]) {
  using Instruction = Wgmma<kConfig.tile_n, kMajorA<kConfig>, kMajorB<kConfig>>;
  const uint64_t a_base =
      operand_descriptor<kMajorA<kConfig>>(ptx::shared_address(shared.a[0]) + warpgroup * kBoxBytes);
  const uint64_t b_base = operand_descriptor<kMajorB<kConfig>>(ptx::shared_address(shared.b[0]));
  uint32_t previous = 0;
  for (int32_t block = 0; block < k_blocks; ++block) {
    ptx::mbarrier_wait(shared.full[cursor.stage], cursor.phase, "stage full");
    const uint64_t a = a_base + cursor.stage * (SharedStorage<kConfig>::kOperandABytes >> 4);
    const uint64_t b = b_base + cursor.stage * (SharedStorage<kConfig>::kOperandBBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < kTileK / 16; ++step) {
      Instruction::issue(d, a + step * kDescriptorStepK16<kMajorA<kConfig>>,
                         b + step * kDescriptorStepK16<kMajorB<kConfig>>, block > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (block > 0) release_stage<kConfig>(shared, previous);
    previous = cursor.stage;
    cursor.advance();
  }
  wgmma_wait<0>();
  pin_registers(d);
  release_stage<kConfig>(shared, previous);
}

// The gradient of an expert without rows is zero.
template <GemmConfig kConfig>
UNIEP_DEVICE void clear_tile(const GemmArguments& arguments, void* output, const WarpTile& tile) {
  constexpr int32_t kElementBytes = kConfig.epilogue == Epilogue::kBFloat16 ? 2 : 4;
  constexpr int32_t kColumnsPerStore = 16 / kElementBytes;
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  for (int32_t row = 0; row < tile.rows; ++row) {
    for (int32_t column = tile.column + lane * kColumnsPerStore;
         column < tile.column + kConfig.tile_n && column < arguments.n_extent; column += 32 * kColumnsPerStore) {
      const int64_t offset = (tile.row + row) * arguments.output_leading + column;
      ptx::store_global_16(static_cast<uint8_t*>(output) + offset * kElementBytes, ptx::Vector16{});
    }
  }
}

// Two warpgroups, 64 rows of the tile each.
template <GemmConfig kConfig>
UNIEP_DEVICE void run_math(const GemmArguments& arguments, void* const* outputs, SharedStorage<kConfig>& shared,
                           int32_t math_warp) {
  constexpr int kCount = kConfig.tile_n / 2;  // accumulators of a thread: 64 x tile_n / 128
  constexpr int32_t kColumns = kConfig.epilogue == Epilogue::kSwiglu ? kConfig.tile_n / 2 : kConfig.tile_n;
  static_assert(kConfig.epilogue != Epilogue::kAccumulate || kConfig.layout == Layout::kWgrad,
                "only weight gradients are accumulated");
  static_assert(kConfig.epilogue != Epilogue::kSwiglu || kConfig.layout == Layout::kForward, "SwiGLU follows FC1");
  static_assert(kConfig.epilogue != Epilogue::kSwigluGradient || kConfig.layout == Layout::kDgrad,
                "dSwiGLU follows FC2's dgrad");
  TaskCursor tasks(shared.tasks);
  StageCursor<kConfig.stages> cursor;
  float d[kCount];
  for (Task task = tasks.take_by_warp(); !task.has(Task::kEnd); task = tasks.take_by_warp()) {
    WarpTile tile;
    const int32_t row_in_tile = math_warp * kBlockRows;
    tile.row = task.m_begin + row_in_tile;
    tile.column = task.n_block * kColumns;
    tile.rows = task.valid_rows - row_in_tile;
    tile.expert = task.expert;
    tile.block = ptx::shared_address(shared.staging[math_warp]);
    void* const output = output_of_expert<kConfig>(arguments, outputs, tile.expert);
    if constexpr (kConfig.layout == Layout::kWgrad) {
      if (task.k_blocks == 0) {
        if (task.has(Task::kStore)) clear_tile<kConfig>(arguments, output, tile);
        continue;
      }
    }
    if constexpr (kConfig.epilogue == Epilogue::kSwigluGradient) {
      if (task.has(Task::kStore)) begin_swiglu_gradient<kConfig>(arguments, tile);
    }
    multiply_tile<kConfig>(shared, cursor, math_warp / 4, task.k_blocks, d);
    if (!task.has(Task::kStore)) continue;
    if constexpr (kConfig.epilogue == Epilogue::kBFloat16) {
      store_bfloat16<kConfig>(arguments, output, tile, d);
    } else if constexpr (kConfig.epilogue == Epilogue::kSwiglu) {
      store_swiglu<kConfig>(arguments, static_cast<BFloat16*>(output), tile, d);
    } else if constexpr (kConfig.epilogue == Epilogue::kSwigluGradient) {
      store_swiglu_gradient<kConfig>(arguments, static_cast<BFloat16*>(output), tile, d);
    } else {
      store_float32<kConfig>(arguments, output, tile, d);
    }
  }
}

}  // namespace uniep::cuda
