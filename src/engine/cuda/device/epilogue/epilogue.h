#pragma once

#include "engine/cuda/device/arguments/gemm_arguments.h"
#include "engine/cuda/device/epilogue/staging.h"
#include "engine/cuda/device/shared_memory/shared_storage.h"

// What the epilogues share. Each math warp owns 16 rows of the tile and works alone: no barrier, no wait for another
// warp. An epilogue is a class of which each math warp keeps one:
//   kSteps, step<i>(next)  work left over from the previous tile, done between the K blocks of the next one, while the
//                          tensor cores are busy; step(next), in a loop, if kRolled; in groups, if kStepsInGroup:
//                          step<i>(next) of each and then its end_group(next)
//   finish(tile, d)        what must happen at once, so that the accumulators are free again
namespace uniep::cuda {

// The part of a tile that one math warp owns.
struct WarpTile {
  static constexpr int32_t kBeyond = 1 << 30;

  int32_t row = 0;           // absolute first row
  int32_t column = kBeyond;  // absolute first column
  int32_t rows = 0;          // of 16, how many exist; may be <= 0
  int32_t expert = 0;
  int32_t gemm = 0;     // of the megakernel's weight gradients: 0 dW2, 1 dW1
  bool exists = false;  // false: nothing is to be read or written, and column is kBeyond
};

// Where D goes in a standalone kernel: addresses, and maps where TMA writes.
struct OutputTable {
  void* const* addresses;
  const TensorMap* maps;
};

template <GemmConfig kConfig>
class StandaloneOutput {
 public:
  static constexpr int64_t kElementBytes =
      kConfig.epilogue == Epilogue::kFloat32 || kConfig.epilogue == Epilogue::kAccumulate ? 4 : 2;

  UNIEP_DEVICE StandaloneOutput(const GemmArguments& arguments, const OutputTable& outputs)
      : arguments_(arguments), outputs_(outputs) {}

  // Row 0, column 0 of the matrix that a tile belongs to.
  UNIEP_DEVICE void* matrix(const WarpTile& tile) const {
    if constexpr (kConfig.layout != Layout::kWgrad) return outputs_.addresses[0];
    if (arguments_.output_per_expert != 0) return outputs_.addresses[tile.expert];
    return static_cast<uint8_t*>(outputs_.addresses[0]) + tile.expert * arguments_.output_expert_stride * kElementBytes;
  }
  UNIEP_DEVICE int64_t leading(const WarpTile& /*tile*/) const { return arguments_.output_leading; }
  UNIEP_DEVICE int32_t columns(const WarpTile& /*tile*/) const { return arguments_.n_extent; }
  // The map that an expert's matrix is in, which one of the map's it is, and the tile's first row there.
  UNIEP_DEVICE const TensorMap& map(const WarpTile& tile) const {
    return outputs_.maps[arguments_.output_per_expert != 0 ? tile.expert : 0];
  }
  UNIEP_DEVICE int32_t matrix_in_map(const WarpTile& tile) const {
    return arguments_.output_per_expert != 0 ? 0 : tile.expert;
  }
  UNIEP_DEVICE int32_t row_in_map(const WarpTile& tile) const { return tile.row; }
  UNIEP_DEVICE static constexpr int32_t box_rows(const WarpTile& /*tile*/) { return kTileM; }

 private:
  const GemmArguments& arguments_;
  const OutputTable outputs_;
};

// Rounds at once, writes 64 columns a step.
template <GemmConfig kConfig, typename Output>
class BFloat16Epilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kSteps = kConfig.tile_n / kBlockColumns;
  static constexpr bool kRolled = false;

  UNIEP_DEVICE BFloat16Epilogue(const Output& output, uint32_t staging) : output_(output), staging_(staging) {}

  UNIEP_DEVICE void finish(const WarpTile& tile, const float (&d)[kCount]) {
    tile_ = tile;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) rounded_[i] = pack_bfloat16(d[2 * i], d[2 * i + 1]);
  }

  template <int kStep>
  UNIEP_DEVICE void step(const WarpTile& /*next*/) {
    if (!tile_.exists) return;
    const uint32_t* const v = rounded_ + kStep * 16;
#pragma unroll
    for (int32_t pair = 0; pair < 4; ++pair) {
      put_fragment(staging_, pair, v + 4 * pair);
    }
    __syncwarp();
    const int32_t column = tile_.column + kStep * kBlockColumns;
    auto* const output = static_cast<BFloat16*>(output_.matrix(tile_));
    const int64_t leading = output_.leading(tile_);
    write_block<kConfig.layout != Layout::kWgrad>(
        staging_, {output + tile_.row * leading + column, leading, tile_.rows, output_.columns(tile_) - column});
    __syncwarp();
  }

 private:
  const Output output_;
  const uint32_t staging_;
  WarpTile tile_;
  uint32_t rounded_[kCount / 2];
};

// A row's router weight; +0 where the row does not exist.
UNIEP_DEVICE float row_prob(const GemmArguments& arguments, const WarpTile& tile, int32_t row) {
  return row < tile.rows ? __ldg(arguments.prob + tile.row + row) : 0.0f;
}

}  // namespace uniep::cuda
