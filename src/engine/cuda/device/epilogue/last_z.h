#pragma once

#include "engine/cuda/device/epilogue/epilogue.h"
#include "engine/cuda/device/ptx/tma.h"

// dSwiGLU's last tile: its deferred epilogue runs beside no mainloop, so that what z takes to come would count. Its z
// comes through the stages instead, a chunk of 64 columns in each, as soon as the last K blocks free them.
namespace uniep::cuda {

constexpr uint32_t kTransferBytes = kBlockRows * kTransferColumns * 2;  // of a math warp's rows: gate, or up
template <GemmConfig kConfig>
constexpr uint32_t kTransferBoxBytes = kConfig.expert.gated() ? 2 * kTransferBytes : kTransferBytes;

// A's place has the first half of a chunk's columns, B's the second.
template <GemmConfig kConfig>
UNIEP_DEVICE uint32_t last_z(SharedStorage<kConfig>& shared, uint32_t stage, uint32_t math_warp, int32_t half) {
  constexpr uint32_t kBytes = kMathWarps * kTransferBoxBytes<kConfig>;
  static_assert(kBytes <= SharedStorage<kConfig>::kOperandABytes && kBytes <= SharedStorage<kConfig>::kOperandBBytes,
                "each operand's place holds half a chunk");
  static_assert(kConfig.pipeline_stages >= kConfig.tile_n / kProbColumns,
                "each of a tile's chunks has a stage of its own");
  return ptx::shared_address(half == 0 ? shared.a[stage] : shared.b[stage]) + math_warp * kTransferBoxBytes<kConfig>;
}

// The loader, after its last task: the tile from `row` and `first_column` on.
template <GemmConfig kConfig>
UNIEP_DEVICE void load_last_z(const TensorMap& z, SharedStorage<kConfig>& shared,
                              StageCursor<kConfig.pipeline_stages>& cursor, int32_t row, int32_t first_column) {
#pragma unroll 1
  for (int32_t chunk = 0; chunk < kConfig.tile_n / kProbColumns; ++chunk, cursor.advance()) {
    ptx::mbarrier_wait(shared.empty[cursor.stage], cursor.phase ^ 1, "stage empty");
    ptx::mbarrier_arrive_expect_bytes(shared.full[cursor.stage], 2 * kMathWarps * kTransferBoxBytes<kConfig>);
#pragma unroll 1
    for (int32_t box = 0; box < 2 * kMathWarps; ++box) {
      const int32_t warp = box / 2;
      const int32_t half = box % 2;
      ptx::tma_load_3d(last_z<kConfig>(shared, cursor.stage, warp, half), z, shared.full[cursor.stage],
                       {first_column + chunk * kProbColumns + half * kTransferColumns, row + warp * kBlockRows, 0});
    }
  }
}

}  // namespace uniep::cuda
