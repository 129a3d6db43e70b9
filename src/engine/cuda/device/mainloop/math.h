#pragma once

#include "engine/cuda/device/epilogue/epilogue_swiglu.h"
#include "engine/cuda/device/epilogue/epilogue_swiglu_gradient.h"
#include "engine/cuda/device/mainloop/loader.h"
#include "engine/cuda/device/mainloop/release_stage.h"
#include "engine/cuda/device/mainloop/wgmma.h"
#include "engine/cuda/device/ptx/cluster.h"

namespace uniep::cuda {

// Of a matrix D, as a math warp keeps it.
template <GemmConfig kConfig, typename Output>
UNIEP_DEVICE auto make_matrix_epilogue(const Output& output, SharedStorage<kConfig>& shared, int32_t math_warp) {
  if constexpr (lends_stages(kConfig)) {
    return GradientEpilogue<kConfig>(shared, math_warp);
  } else {
    uint32_t staging = ptx::shared_address(shared.staging[math_warp]);
    if (kConfig.in_layer) staging = ptx::uniform_register(staging);
    return BFloat16Epilogue<kConfig, Output>(output, staging);
  }
}

// A standalone kernel's epilogue.
template <GemmConfig kConfig>
UNIEP_DEVICE auto make_epilogue(const GemmArguments& arguments, const OutputTable& outputs,
                                SharedStorage<kConfig>& shared, int32_t math_warp) {
  const uint32_t staging = ptx::shared_address(shared.staging[math_warp]);
  if constexpr (kConfig.epilogue == Epilogue::kSwiglu) {
    return SwigluEpilogue<kConfig>(arguments, outputs.addresses, staging);
  } else if constexpr (kConfig.epilogue == Epilogue::kSwigluGradient) {
    return SwigluGradientEpilogue<kConfig, StandaloneGradient>(StandaloneGradient(arguments), staging);
  } else {
    return make_matrix_epilogue<kConfig>(StandaloneOutput<kConfig>(arguments, outputs), shared, math_warp);
  }
}

// Rolled steps of a deferred epilogue may come in groups: a loop over them, each step of one with its own code. What
// the last tile leaves over is then run apart.
template <typename DeferredEpilogue>
constexpr bool kHasGroups = requires {
  DeferredEpilogue::kStepsInGroup;
};

// Whether a record may have no K blocks: the last one of a standalone kernel, and an expert without rows.
template <GemmConfig kConfig>
constexpr bool kMayBeEmpty = !kConfig.in_layer || kConfig.layout == Layout::kWgrad;

// The mainloop of one warpgroup: 64 rows of the tile.
template <GemmConfig kConfig>
class Mainloop {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;  // accumulators of a thread: 64 x tile_n / 128

  UNIEP_DEVICE Mainloop(SharedStorage<kConfig>& shared, int32_t warpgroup,
                        const StageCursor<kConfig.pipeline_stages>& cursor = {})
      : shared_(shared),
        warpgroup_(warpgroup),
        a_base_(operand_descriptor<kMajorA<kConfig>>(ptx::shared_address(shared.a[0]) + warpgroup * kBoxBytes)),
        b_base_(operand_descriptor<kMajorB<kConfig>>(base_of(shared.b[0]))),
        cursor_(cursor) {}

  // One chain from zero along K ascending. Unless stages are released first, one group of four wgmma stays in flight
  // while the next stage is awaited.
  // The steps that the previous tile's epilogue left over run between the first K blocks.
  template <typename DeferredEpilogue>
  UNIEP_DEVICE void multiply(int32_t k_blocks, float (&d)[kCount], DeferredEpilogue& deferred, const WarpTile& tile) {
    static_assert(DeferredEpilogue::kSteps == deferred_steps(kConfig),
                  "the scheduler must know how many K blocks are needed");
    constexpr int kInterleaved = interleaved_blocks(kConfig);
    if (kMayBeEmpty<kConfig> && !kHasGroups<DeferredEpilogue> && k_blocks == 0) {
      steps<0>(deferred, tile);
      return;
    }
    if (kConfig.layout == Layout::kWgrad && k_blocks < kInterleaved) {
      steps<0>(deferred, tile);
      multiply_block<true>(d);
      for (int32_t block = 1; block < k_blocks; ++block) multiply_block<false>(d);
    } else {
      int32_t block = kInterleaved;
      if constexpr (DeferredEpilogue::kRolled) {
        block = spread(k_blocks, d, deferred, tile);
      } else {
        interleave<0, kInterleaved>(d, deferred, tile);
      }
      for (; block < k_blocks; ++block) multiply_block<false>(d);
    }
    wgmma_wait<0>();
    pin_registers(d);
    release_stage<kConfig>(shared_, previous_);
  }

  StageCursor<kConfig.pipeline_stages>& cursor() { return cursor_; }

 private:
  // The standalone kernels have it in a uniform register anyway.
  UNIEP_DEVICE static uint32_t base_of(const void* shared) {
    const uint32_t address = ptx::shared_address(shared);
    return kConfig.in_layer ? ptx::uniform_register(address) : address;
  }

  // Spreads the steps evenly over the K blocks, the second warpgroup's halfway between the first one's: while one
  // computes, the other keeps the tensor cores busy. Returns how many K blocks that took.
  template <typename DeferredEpilogue>
  UNIEP_DEVICE int32_t spread(int32_t k_blocks, float (&d)[kCount], DeferredEpilogue& deferred, const WarpTile& tile) {
    int32_t spacing = (k_blocks - 1) / DeferredEpilogue::kSteps;
    if (kConfig.epilogue == Epilogue::kLayer && spacing > kLayerSpacing) spacing = kLayerSpacing;
    multiply_block<true>(d);
    int32_t left = first_span(spacing);
    const auto blocks_between = [&] {
#pragma unroll 1
      do {
        multiply_block<false>(d);
      } while (--left > 0);
      left = spacing;
    };
    if constexpr (kHasGroups<DeferredEpilogue>) {
#pragma unroll 1
      for (int group = 0; group < DeferredEpilogue::kSteps / DeferredEpilogue::kStepsInGroup; ++group) {
        run_group<0>(deferred, tile, blocks_between);
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < DeferredEpilogue::kSteps; ++step) {
        blocks_between();
        deferred.step(tile);
      }
    }
    // Computed anew: there is no register to keep the first span in.
    asm volatile("" : "+r"(spacing));
    return 1 + DeferredEpilogue::kSteps * spacing + first_span(spacing) - spacing;
  }

  // What is left of a group from kStep on.
  template <int kStep, typename DeferredEpilogue, typename Between>
  UNIEP_DEVICE void run_group(DeferredEpilogue& deferred, const WarpTile& tile, const Between& between) {
    between();
    if constexpr (kStep + 1 < DeferredEpilogue::kStepsInGroup) {
      deferred.template step<kStep>(tile);
      run_group<kStep + 1>(deferred, tile, between);
    } else {
      deferred.end_group(tile);
    }
  }

  // K blocks before the first step.
  UNIEP_DEVICE int32_t first_span(int32_t spacing) const {
    return spacing > 1 && warpgroup_ == 1 ? spacing / 2 : spacing;
  }

  // All at once; but groups of them: the caller runs those (run_alone).
  template <int kStep, typename DeferredEpilogue>
  UNIEP_DEVICE void steps(DeferredEpilogue& deferred, const WarpTile& tile) {
    if constexpr (DeferredEpilogue::kRolled && !kHasGroups<DeferredEpilogue>) {
#pragma unroll 1
      for (int step = 0; step < DeferredEpilogue::kSteps; ++step) deferred.step(tile);
    } else if constexpr (!DeferredEpilogue::kRolled && kStep < DeferredEpilogue::kSteps) {
      deferred.template step<kStep>(tile);
      steps<kStep + 1>(deferred, tile);
    }
  }

  template <int kBlock, int kInterleaved, typename DeferredEpilogue>
  UNIEP_DEVICE void interleave(float (&d)[kCount], DeferredEpilogue& deferred, const WarpTile& tile) {
    if constexpr (kBlock < kInterleaved) {
      multiply_block<kBlock == 0>(d);
      if constexpr (DeferredEpilogue::kSteps > 0) deferred.template step<kBlock>(tile);
      interleave<kBlock + 1, kInterleaved>(d, deferred, tile);
    }
  }

  // Issues one K block and hands back the stage of the one before.
  template <bool kFirst>
  UNIEP_DEVICE void multiply_block(float (&d)[kCount]) {
    using Instruction = Wgmma<kConfig.tile_n, kMajorA<kConfig>, kMajorB<kConfig>>;
    const uint32_t stage = ptx::warp_uniform(cursor_.stage);  // keeps descriptors out of vector registers
    if constexpr (!kFirst && kReleasesFirst) {
      wgmma_wait<0>();
      release_stage<kConfig>(shared_, previous_);
    }
    ptx::mbarrier_wait(shared_.full[stage], cursor_.phase, "stage full");
    const uint64_t a = a_base_ + stage * (SharedStorage<kConfig>::kOperandABytes >> 4);
    const uint64_t b = b_base_ + stage * (SharedStorage<kConfig>::kOperandBBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < kTileK / 16; ++step) {
      if (kFirst && step == 0) {
        Instruction::start(d, a, b);
      } else {
        Instruction::add(d, a + step * kDescriptorStepK16<kMajorA<kConfig>>,
                         b + step * kDescriptorStepK16<kMajorB<kConfig>>);
      }
    }
    wgmma_commit();
    if constexpr (!kReleasesFirst) {
      wgmma_wait<1>();
      if constexpr (!kFirst) release_stage<kConfig>(shared_, previous_);
    }
    previous_ = cursor_.stage;
    cursor_.advance();
  }

  // A warpgroup may end one K block before it issues the next, while the other warpgroup's keep the tensor cores busy:
  // stages are free earlier, which saves up to 0.9 %. Beside a deferred epilogue that computes it would cost up to 4.5
  // %.
  static constexpr bool kReleasesFirst = kConfig.epilogue == Epilogue::kBFloat16 ||
                                         kConfig.epilogue == Epilogue::kFloat32 ||
                                         kConfig.epilogue == Epilogue::kAccumulate;

  SharedStorage<kConfig>& shared_;
  const int32_t warpgroup_;
  const uint64_t a_base_;
  const uint64_t b_base_;
  StageCursor<kConfig.pipeline_stages> cursor_;
  uint32_t previous_ = 0;
};

// The gradient of an expert without rows is zero.
template <GemmConfig kConfig, typename Output>
UNIEP_DEVICE void clear_tile(const Output& output, const WarpTile& tile) {
  constexpr int32_t kElementBytes = kConfig.epilogue == Epilogue::kBFloat16 ? 2 : 4;
  constexpr int32_t kColumnsPerStore = 16 / kElementBytes;
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  auto* const matrix = static_cast<uint8_t*>(output.matrix(tile));
  const int32_t columns = output.columns(tile);
  for (int32_t row = 0; row < tile.rows && row < kBlockRows; ++row) {
    for (int32_t column = tile.column + lane * kColumnsPerStore;
         column < tile.column + kConfig.tile_n && column < columns; column += 32 * kColumnsPerStore) {
      const int64_t offset = (tile.row + row) * output.leading(tile) + column;
      ptx::store_global_16(matrix + offset * kElementBytes, ptx::Vector16{});
    }
  }
}

// Two warpgroups, 64 rows of the tile each.
template <GemmConfig kConfig>
UNIEP_DEVICE void run_math(const GemmArguments& arguments, const OutputTable& outputs, SharedStorage<kConfig>& shared,
                           int32_t math_warp) {
  constexpr int32_t kColumns = kConfig.epilogue == Epilogue::kSwiglu ? kConfig.tile_n / 2 : kConfig.tile_n;
  static_assert((kConfig.epilogue != Epilogue::kAccumulate && kConfig.epilogue != Epilogue::kFloat32) ||
                    kConfig.layout == Layout::kWgrad,
                "only weight gradients are fp32");
  static_assert(kConfig.epilogue != Epilogue::kSwiglu || kConfig.layout == Layout::kForward, "SwiGLU follows FC1");
  static_assert(kConfig.epilogue != Epilogue::kSwigluGradient || kConfig.layout == Layout::kDgrad,
                "dSwiGLU follows FC2's dgrad");
  TaskCursor tasks(shared.tasks);
  Mainloop<kConfig> mainloop(shared, math_warp / 4);
  auto epilogue = make_epilogue<kConfig>(arguments, outputs, shared, math_warp);
  constexpr bool kAlone = kHasGroups<decltype(epilogue)>;
  float d[Mainloop<kConfig>::kCount];
  for (bool more = true; more;) {
    const Task task = tasks.take_by_warp();
    more = !task.has(Task::kEnd);  // the last record has no K blocks: only what is left over runs
    if (kAlone && !more) break;
    const int32_t row_in_tile = math_warp * kBlockRows;
    WarpTile tile;
    tile.exists = task.has(Task::kStore);
    tile.row = task.m_begin + row_in_tile;
    tile.column = tile.exists ? task.n_block * kColumns : WarpTile::kBeyond;
    tile.rows = task.valid_rows - row_in_tile;
    tile.expert = task.expert;
    mainloop.multiply(task.k_blocks, d, epilogue, tile);
    if constexpr (kConfig.layout == Layout::kWgrad) {
      if (tile.exists && task.k_blocks == 0) {
        clear_tile<kConfig>(StandaloneOutput<kConfig>(arguments, outputs), tile);
        tile.exists = false;
      }
    }
    if constexpr (lends_stages(kConfig)) {
      if (task.k_blocks > 0) epilogue.finish(tile, d, mainloop.cursor());
    } else {
      epilogue.finish(tile, d);
    }
  }
  if constexpr (kAlone) epilogue.run_alone(shared, mainloop.cursor());
}

// A warp: fp32 weight gradients, on their way from lent stages to memory.
template <GemmConfig kConfig>
UNIEP_DEVICE void run_lent_store(const GemmArguments& arguments, const OutputTable& outputs,
                                 SharedStorage<kConfig>& shared) {
  TaskCursor tasks(shared.tasks);
  LentStore<kConfig, StandaloneOutput<kConfig>> store(shared, {arguments, outputs});
  for (Task task = tasks.take_by_warp(); !task.has(Task::kEnd); task = tasks.take_by_warp()) {
    store.run(task.k_blocks, task.has(Task::kStore),
              {.row = task.m_begin, .column = task.n_block * kConfig.tile_n, .expert = task.expert});
  }
}

}  // namespace uniep::cuda
