#pragma once

#include "engine/cuda/device/gemm_arguments.h"
#include "engine/cuda/device/roles/staging.h"
#include "engine/cuda/device/shared_storage.h"

// Plain epilogues. Each math warp owns 16 rows of the tile and works alone: no barrier, no wait for another warp.
namespace uniep::cuda {

// The part of a tile that one math warp owns.
struct WarpTile {
  int32_t row;      // absolute first row
  int32_t column;   // absolute first column
  int32_t rows;     // of 16, how many exist
  int32_t expert;
  uint32_t block;   // the warp's staging
};

template <GemmConfig kConfig>
UNIEP_DEVICE void* output_of_expert(const GemmArguments& arguments, void* const* outputs, int32_t expert) {
  if constexpr (kConfig.layout != Layout::kWgrad) return outputs[0];
  if (arguments.output_per_expert != 0) return outputs[expert];
  constexpr int64_t kElementBytes = kConfig.epilogue == Epilogue::kBFloat16 ? 2 : 4;
  return static_cast<uint8_t*>(outputs[0]) + expert * arguments.output_expert_stride * kElementBytes;
}

template <GemmConfig kConfig, int kCount>
UNIEP_DEVICE void store_bfloat16(const GemmArguments& arguments, void* output, const WarpTile& tile,
                                 const float (&d)[kCount]) {
  constexpr bool kZeroPadding = kConfig.layout != Layout::kWgrad;
#pragma unroll
  for (int32_t part = 0; part < kConfig.tile_n / kBlockColumns; ++part) {
    const float* const values = d + part * 32;
#pragma unroll
    for (int32_t pair = 0; pair < 4; ++pair) {
      const float* const v = values + pair * 8;
      put_fragment(tile.block, pair, pack_bfloat16(v[0], v[1]), pack_bfloat16(v[2], v[3]), pack_bfloat16(v[4], v[5]),
                   pack_bfloat16(v[6], v[7]));
    }
    __syncwarp();
    const int32_t column = tile.column + part * kBlockColumns;
    const BlockTarget target{static_cast<BFloat16*>(output) + tile.row * arguments.output_leading + column,
                             arguments.output_leading, tile.rows, arguments.n_extent - column};
    write_block<kZeroPadding>(tile.block, target);
    __syncwarp();
  }
}

// fp32 rows: four neighbouring threads write 32 bytes. kAccumulate adds to what is there, one rounded add an element.
template <GemmConfig kConfig, int kCount>
UNIEP_DEVICE void store_float32(const GemmArguments& arguments, void* output, const WarpTile& tile,
                                const float (&d)[kCount]) {
  constexpr bool kAccumulate = kConfig.epilogue == Epilogue::kAccumulate;
  constexpr bool kZeroPadding = kConfig.layout != Layout::kWgrad;
  constexpr int32_t kGroups = 8;  // column groups whose loads are in flight together
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  const int32_t row = lane / 4;
  const int32_t first_column = tile.column + lane % 4 * 2;
  float* const base = static_cast<float*>(output) + (tile.row + row) * arguments.output_leading + first_column;
#pragma unroll
  for (int32_t part = 0; part < kConfig.tile_n / 8; part += kGroups) {
    float old[2 * kGroups][2];
    if constexpr (kAccumulate) {
#pragma unroll
      for (int32_t i = 0; i < 2 * kGroups; ++i) {
        const int32_t column = (part + i / 2) * 8;
        if (row + i % 2 * 8 < tile.rows && first_column + column < arguments.n_extent) {
          ptx::load_global_float2(base + i % 2 * 8 * arguments.output_leading + column, old[i][0], old[i][1]);
        }
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 2 * kGroups; ++i) {
      const int32_t column = (part + i / 2) * 8;
      const bool exists = row + i % 2 * 8 < tile.rows;
      if ((!exists && !kZeroPadding) || first_column + column >= arguments.n_extent) continue;
      float x = d[(part + i / 2) * 4 + i % 2 * 2];
      float y = d[(part + i / 2) * 4 + i % 2 * 2 + 1];
      if constexpr (kAccumulate) {
        x = add(old[i][0], x);
        y = add(old[i][1], y);
      }
      if (kZeroPadding && !exists) x = y = 0.0f;
      ptx::store_global_float2(base + i % 2 * 8 * arguments.output_leading + column, x, y);
    }
  }
}

}  // namespace uniep::cuda
