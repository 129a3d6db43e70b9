#pragma once

#include "engine/cuda/device/arguments/gemm_arguments.h"
#include "engine/cuda/device/epilogue/last_z.h"
#include "engine/cuda/device/mainloop/descriptor.h"
#include "engine/cuda/device/mainloop/lent_stages.h"
#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/ptx/tma.h"
#include "engine/cuda/device/shared_memory/shared_storage.h"

namespace uniep::cuda {

template <GemmConfig kConfig>
constexpr Major kMajorA = kConfig.layout == Layout::kWgrad ? Major::kMN : Major::kK;
template <GemmConfig kConfig>
constexpr Major kMajorB = kConfig.layout == Layout::kForward ? Major::kK : Major::kMN;

// The layer's W1, whose gate and up may lie apart: the halves of a tile's columns are then of two maps (FC1), or its K
// blocks are (dgrad FC1).
template <GemmConfig kConfig>
constexpr bool kHalvesApart = (kConfig.epilogue == Epilogue::kLayer) && (kConfig.layout == Layout::kForward);
template <GemmConfig kConfig>
constexpr bool kDepthApart = (kConfig.epilogue == Epilogue::kLayer) && (kConfig.layout == Layout::kDgrad);

constexpr int32_t kDepthTogether = 1 << 30;

// Where a tile's operands are.
struct TileOperands {
  const TensorMap* a;
  const TensorMap* b;
  int32_t up_maps = 0;                  // from B's map of gate rows to that of up rows; 0: one map holds both
  int32_t gate_depth = kDepthTogether;  // kDepthApart: K of the gate rows
  int32_t b_matrix;                     // B's third coordinate
  int32_t m_begin;                      // A's first row; MN-major: column
  int32_t n_low, n_high;                // the same of B, for each half of the tile
  int32_t k_begin;
  int32_t k_blocks;
  bool shared_b;  // the CTAs of the cluster load half of B each, for both
};

// A K block in which the gate rows end and the up rows begin, in groups of 8 rows of K: what the joined matrix has
// there. The maps of such boxes follow those of whole ones.
template <GemmConfig kConfig, typename Load>
UNIEP_DEVICE void load_straddling_block(const TileOperands& tile, uint32_t target, int32_t k, int32_t n_begin,
                                        Load&& load) {
  constexpr int32_t kBoxes = kConfig.tile_n / 2 / static_cast<int32_t>(kBoxColumns);
#pragma unroll 1
  for (int32_t row = 0; row < kTileK; row += kFewDepthRows) {
    const bool is_up = k + row >= tile.gate_depth;
    const TensorMap& map = tile.b[(is_up ? 3 : 2) * tile.up_maps];
#pragma unroll 1
    for (int32_t box = 0; box < kBoxes; ++box) {
      load(map, target + box * kBoxBytes + row * kSwizzleRowBytes, n_begin + box * static_cast<int32_t>(kBoxColumns),
           k + row - (is_up ? tile.gate_depth : 0));
    }
  }
}

struct HalfOfB {
  int32_t n_begin;
  int32_t half;
};

template <GemmConfig kConfig, bool kMulticast>
UNIEP_DEVICE void load_b_half(SharedStorage<kConfig>& shared, const TileOperands& tile, uint32_t stage, int32_t k,
                              const HalfOfB& of) {
  const int32_t n_begin = of.n_begin, half = of.half;
  constexpr int32_t kHalfColumns = kConfig.tile_n / 2;
  constexpr uint16_t kBothCtas = 3;
  const uint32_t target = ptx::shared_address(shared.b[stage]) + half * (SharedStorage<kConfig>::kOperandBBytes / 2);
  const auto load_from = [&](const TensorMap& map, uint32_t address, int32_t c0, int32_t c1) {
    if constexpr (kMulticast) {
      ptx::tma_load_3d_multicast(address, map, shared.full[stage], kBothCtas, {c0, c1, tile.b_matrix});
    } else {
      ptx::tma_load_3d(address, map, shared.full[stage], {c0, c1, tile.b_matrix});
    }
  };
  const TensorMap* b = tile.b;
  if constexpr (kHalvesApart<kConfig>) b += half * tile.up_maps;
  if constexpr (kDepthApart<kConfig>) {
    if (k + kTileK > tile.gate_depth) {
      if (k < tile.gate_depth) return load_straddling_block<kConfig>(tile, target, k, n_begin, load_from);
      b += tile.up_maps;
      k -= tile.gate_depth;
    }
  }
  const auto load = [&](uint32_t address, int32_t c0, int32_t c1) { load_from(*b, address, c0, c1); };
  if constexpr (kMajorB<kConfig> == Major::kK) {
    load(target, k, n_begin);
  } else {
    constexpr bool kAlongK = split_b_along_k(kConfig);
    constexpr int32_t kColumns = static_cast<int32_t>(kBoxColumns);
    constexpr int32_t kBoxes = (kAlongK ? kConfig.tile_n : kHalfColumns) / kColumns;
    const uint32_t first = kAlongK ? ptx::shared_address(shared.b[stage]) + half * (kBoxBytes / 2) : target;
    const int32_t first_n = kAlongK ? tile.n_low : n_begin;
    const int32_t first_k = k + (kAlongK ? half * (kTileK / 2) : 0);
#pragma unroll
    for (int32_t box = 0; box < kBoxes; ++box) load(first + box * kBoxBytes, first_n + box * kColumns, first_k);
  }
}

template <GemmConfig kConfig>
UNIEP_DEVICE void load_a(SharedStorage<kConfig>& shared, const TileOperands& tile, uint32_t stage, int32_t k) {
  const uint32_t target = ptx::shared_address(shared.a[stage]);
  if constexpr (kMajorA<kConfig> == Major::kK) {
    ptx::tma_load_3d(target, *tile.a, shared.full[stage], {k, tile.m_begin, 0});
  } else {
#pragma unroll
    for (int32_t box = 0; box < kTileM / static_cast<int32_t>(kBoxColumns); ++box) {
      ptx::tma_load_3d(target + box * kBoxBytes, *tile.a, shared.full[stage],
                       {tile.m_begin + box * static_cast<int32_t>(kBoxColumns), k, 0});
    }
  }
}

// Every stage of every CTA receives the same number of bytes, whoever sends them. before(block) runs before each block.
template <GemmConfig kConfig, typename Before>
UNIEP_DEVICE void load_tile(SharedStorage<kConfig>& shared, StageCursor<kConfig.pipeline_stages>& cursor,
                            const TileOperands& tile, int32_t cta, const Before& before) {
  for (int32_t block = 0; block < tile.k_blocks; ++block, cursor.advance()) {
    before(block);
    const int32_t k = tile.k_begin + block * kTileK;
    ptx::mbarrier_wait(shared.empty[cursor.stage], cursor.phase ^ 1, "stage empty");
    ptx::mbarrier_arrive_expect_bytes(shared.full[cursor.stage], stage_bytes(kConfig));
    load_a<kConfig>(shared, tile, cursor.stage, k);
    if (kConfig.cluster == 2 && tile.shared_b) {
      load_b_half<kConfig, true>(shared, tile, cursor.stage, k, {cta == 0 ? tile.n_low : tile.n_high, cta});
    } else {
      load_b_half<kConfig, false>(shared, tile, cursor.stage, k, {tile.n_low, 0});
      load_b_half<kConfig, false>(shared, tile, cursor.stage, k, {tile.n_high, 1});
    }
  }
}

// For kSwiglu the first half of a tile of B is gate rows, the second the matching up rows.
template <GemmConfig kConfig>
UNIEP_DEVICE TileOperands operands_of(const GemmArguments& arguments, const TensorMap* b_maps, const Task& task) {
  constexpr int32_t kHalfColumns = kConfig.tile_n / 2;
  constexpr bool kSwiglu = kConfig.epilogue == Epilogue::kSwiglu;
  const bool map_per_expert = arguments.map_per_expert != 0;
  TileOperands tile;
  tile.a = &arguments.a;
  tile.b = &b_maps[map_per_expert ? task.expert : 0];
  tile.b_matrix = kConfig.layout == Layout::kWgrad || map_per_expert ? 0 : task.expert;
  tile.m_begin = task.m_begin;
  tile.n_low = task.n_block * (kSwiglu ? kHalfColumns : kConfig.tile_n);
  tile.n_high = tile.n_low + (kSwiglu ? arguments.n_extent : kHalfColumns);
  tile.k_begin = task.k_begin;
  tile.k_blocks = task.k_blocks;
  tile.shared_b = task.has(Task::kSharedB);
  return tile;
}

// One thread: keeps the stages full.
template <GemmConfig kConfig>
UNIEP_DEVICE void run_loader(const GemmArguments& arguments, const TensorMap* b_maps, SharedStorage<kConfig>& shared) {
  const int32_t cta = kConfig.cluster == 1 ? 0 : static_cast<int32_t>(ptx::cluster_rank());
  TaskCursor tasks(shared.tasks);
  StageCursor<kConfig.pipeline_stages> cursor;
  [[maybe_unused]] Task last{};
  for (Task task = tasks.take(); !task.has(Task::kEnd); task = tasks.take()) {
    load_tile<kConfig>(shared, cursor, operands_of<kConfig>(arguments, b_maps, task), cta, [](int32_t /*block*/) {});
    if constexpr (lends_stages(kConfig)) {
      const StandaloneOutput<kConfig> output(arguments, {nullptr, b_maps + kConfig.maps});
      if (task.k_blocks > 0) {
        lend_stages(shared, cursor, output, task.has(Task::kStore),
                    {.row = task.m_begin, .column = task.n_block * kConfig.tile_n, .expert = task.expert});
      }
    }
    last = task;
  }
  if constexpr (kConfig.epilogue == Epilogue::kSwigluGradient) {
    const int32_t column = last.has(Task::kStore) ? last.n_block * kConfig.tile_n : WarpTile::kBeyond;
    load_last_z<kConfig>(arguments.z, shared, cursor, last.m_begin, column);
  }
}

}  // namespace uniep::cuda
