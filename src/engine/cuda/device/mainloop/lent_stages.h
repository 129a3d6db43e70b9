#pragma once

#include "engine/cuda/device/epilogue/epilogue.h"
#include "engine/cuda/device/mainloop/release_stage.h"
#include "engine/cuda/device/ptx/tma.h"

// fp32 weight gradients, on their way out and, where they are added to what is there, in. A tile of them is as large as
// the stages, there are no registers to keep it in while the next tile is multiplied, and an SM takes 4,096 clocks to
// give it out. So behind a tile's last K block the loader lends the next stages, and loads the old values into them
// while the last K blocks are multiplied; the math warps put their sums in place of them and go on; a warp that has
// time stores them, and hands each stage back for the math warps as soon as TMA has read it.
namespace uniep::cuda {

constexpr uint32_t kLentWarpBytes = kLentBoxBytes / kMathWarps;  // 16 rows of 128 bytes
constexpr uint32_t kLentRowBytes = kLentColumns * 4;

// A math warp's part of box `box` of a stage; 16-byte chunk c of row r lies at chunk c ^ (r % 8).
template <GemmConfig kConfig>
UNIEP_DEVICE uint32_t lent_box(SharedStorage<kConfig>& shared, uint32_t stage, int32_t box, uint32_t math_warp) {
  constexpr int32_t kInB = lent_boxes_of_stage(kConfig) - 1;
  static_assert(kConfig.pipeline_stages >= 2, "a stage goes back when the next one is done");
  static_assert(kLentBoxBytes <= SharedStorage<kConfig>::kOperandABytes &&
                    kInB * kLentBoxBytes <= SharedStorage<kConfig>::kOperandBBytes,
                "each operand's place holds its boxes");
  const uint32_t place =
      box < kInB ? ptx::shared_address(shared.b[stage]) + box * kLentBoxBytes : ptx::shared_address(shared.a[stage]);
  return place + math_warp * kLentWarpBytes;
}

// The loader, behind the last K block of the CTA's tile. Both CTAs of a cluster walk the same stages, also one whose
// tile does not exist.
template <GemmConfig kConfig, typename Output>
UNIEP_DEVICE void lend_stages(SharedStorage<kConfig>& shared, StageCursor<kConfig.pipeline_stages>& cursor,
                              const Output& output, bool exists, const WarpTile& tile) {
  constexpr int32_t kBoxes = kConfig.tile_n / kLentColumns;
  constexpr int32_t kOfStage = lent_boxes_of_stage(kConfig);
#pragma unroll 1
  for (int32_t first = 0; first < kBoxes; first += kOfStage, cursor.advance()) {
    ptx::mbarrier_wait(shared.empty[cursor.stage], cursor.phase ^ 1, "stage empty");
    if (kConfig.epilogue != Epilogue::kAccumulate || !exists) {
      ptx::mbarrier_arrive(shared.full[cursor.stage]);
      continue;
    }
    const int32_t count = first + kOfStage < kBoxes ? kOfStage : kBoxes - first;
    ptx::mbarrier_arrive_expect_bytes(shared.full[cursor.stage], count * kLentBoxBytes);
#pragma unroll 1
    for (int32_t box = 0; box < count; ++box) {
#pragma unroll 1
      for (int32_t row = 0; row < kTileM; row += output.box_rows(tile)) {
        WarpTile part = tile;
        part.row += row;
        ptx::tma_load_3d(
            lent_box<kConfig>(shared, cursor.stage, box, row / kBlockRows), output.map(part), shared.full[cursor.stage],
            {tile.column + (first + box) * kLentColumns, output.row_in_map(part), output.matrix_in_map(part)});
      }
    }
  }
}

// A math warp's.
template <GemmConfig kConfig>
class GradientEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kSteps = 0;
  static constexpr bool kRolled = false;

  UNIEP_DEVICE GradientEpilogue(SharedStorage<kConfig>& shared, int32_t math_warp)
      : shared_(shared), math_warp_(math_warp) {}

  // Of a tile that has K blocks.
  UNIEP_DEVICE void finish(const WarpTile& tile, const float (&d)[kCount],
                           StageCursor<kConfig.pipeline_stages>& cursor) {
    walk<0>(tile, d, cursor);
  }

 private:
  static constexpr int32_t kOfStage = lent_boxes_of_stage(kConfig);

  template <int kStage>
  UNIEP_DEVICE void walk(const WarpTile& tile, const float (&d)[kCount], StageCursor<kConfig.pipeline_stages>& cursor) {
    if constexpr (kStage < lent_stages(kConfig)) {
      const uint32_t stage = ptx::warp_uniform(cursor.stage);
      ptx::mbarrier_wait(shared_.full[stage], cursor.phase, "stage lent");
      if (tile.exists) {
        put<kStage, 0>(d, stage);
        ptx::fence_proxy_async_shared();
      }
      __syncwarp();
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared_.put[stage]);
      cursor.advance();
      walk<kStage + 1>(tile, d, cursor);
    }
  }

  template <int kStage, int kBox>
  static constexpr bool kExists = kBox < kOfStage && (kStage * kOfStage + kBox) * kLentColumns < kConfig.tile_n;

  // A thread has two neighbouring columns of rows lane / 4 and 8 below, in each group of eight columns. Odd rows take
  // groups 0 and 2, 1 and 3 in the other order: so 16 lanes, whose 8 bytes pass together, meet 16 banks each once.
  template <int kStage, int kBox>
  UNIEP_DEVICE void put(const float (&d)[kCount], uint32_t stage) {
    if constexpr (kExists<kStage, kBox>) {
      constexpr int32_t kFirst = (kStage * kOfStage + kBox) * kLentColumns / 2;
      const uint32_t lane = ptx::lane_index(), row = lane / 4;
      const bool is_odd = row % 2 != 0;
      const uint32_t key = ((is_odd ? 4u : 0u) + (lane >> 1 & 1u)) ^ row;
      const uint32_t first =
          lent_box<kConfig>(shared_, stage, kBox, math_warp_) + row * kLentRowBytes + (key << 4) + lane % 2 * 8;
      const auto address = [&](int32_t group, int32_t half) {
        return (first + half * 8 * kLentRowBytes) ^ static_cast<uint32_t>(group << 5);
      };
      uint32_t old[4][2][2];
      if constexpr (kConfig.epilogue == Epilogue::kAccumulate) {
#pragma unroll
        for (int32_t i = 0; i < 8; ++i) {
          ptx::load_shared_8(address(i / 2, i % 2), old[i / 2][i % 2][0], old[i / 2][i % 2][1]);
        }
      }
#pragma unroll
      for (int32_t i = 0; i < 8; ++i) {
        const int32_t group = i / 2, half = i % 2;
        const float* const even = d + kFirst + group * 4 + half * 2;
        const float* const odd = d + kFirst + (group ^ 2) * 4 + half * 2;
        float x = is_odd ? odd[0] : even[0];
        float y = is_odd ? odd[1] : even[1];
        if constexpr (kConfig.epilogue == Epilogue::kAccumulate) {
          x = add(float_from_bits(old[group][half][0]), x);  // one rounded add an element
          y = add(float_from_bits(old[group][half][1]), y);
        }
        ptx::store_shared_8(address(group, half), bits_of_float(x), bits_of_float(y));
      }
      put<kStage, kBox + 1>(d, stage);
    }
  }

  SharedStorage<kConfig>& shared_;
  const uint32_t math_warp_;
};

// One warp's: stores what was put into lent stages. It is told of every tile of the launch, in order.
template <GemmConfig kConfig, typename Output>
class LentStore {
 public:
  UNIEP_DEVICE LentStore(SharedStorage<kConfig>& shared, const Output& output) : shared_(shared), output_(output) {}

  // A tile that is lent nothing.
  UNIEP_DEVICE void pass(int32_t k_blocks) { stage_ = (stage_ + k_blocks) % kConfig.pipeline_stages; }

  // `tile`: the CTA's.
  UNIEP_DEVICE void run(int32_t k_blocks, bool exists, const WarpTile& tile) {
    pass(k_blocks);
    if (k_blocks == 0) return;
#pragma unroll 1
    for (int32_t i = 0; i < kLent; ++i) {
      ptx::mbarrier_wait(shared_.put[stage_], parities_ >> stage_ & 1, "stage put");
      parities_ ^= 1u << stage_;
      if (exists && ptx::lane_index() == 0) store(i, tile);
      if (i > 0) hand_back<1>();
      previous_ = stage_;
      pass(1);
    }
    hand_back<0>();
  }

 private:
  static constexpr int32_t kLent = lent_stages(kConfig);

  UNIEP_DEVICE void store(int32_t i, const WarpTile& tile) const {
    constexpr int32_t kOfStage = lent_boxes_of_stage(kConfig), kBoxes = kConfig.tile_n / kLentColumns;
#pragma unroll 1
    for (int32_t box = 0; box < kOfStage && i * kOfStage + box < kBoxes; ++box) {
#pragma unroll 1
      for (int32_t row = 0; row < kTileM; row += output_.box_rows(tile)) {
        WarpTile part = tile;
        part.row += row;
        ptx::tma_store_3d(output_.map(part), lent_box<kConfig>(shared_, stage_, box, row / kBlockRows),
                          tile.column + (i * kOfStage + box) * kLentColumns, output_.row_in_map(part),
                          output_.matrix_in_map(part));
      }
    }
    ptx::bulk_commit();
  }

  // The stage before this one, or with kNewer 0 the last: once TMA has read it.
  template <int kNewer>
  UNIEP_DEVICE void hand_back() const {
    if (ptx::lane_index() == 0) ptx::bulk_wait_read<kNewer>();
    __syncwarp();
    release_stage_for_all<kConfig>(shared_, previous_);
  }

  SharedStorage<kConfig>& shared_;
  const Output output_;
  uint32_t stage_ = 0;
  uint32_t previous_ = 0;
  uint32_t parities_ = 0;  // a bit a stage: of its next putting
};

// Until all stages are free, behind the last tile: for who uses their memory next. `cursor`: where the loader goes on.
template <GemmConfig kConfig>
UNIEP_DEVICE void wait_for_free_stages(SharedStorage<kConfig>& shared, StageCursor<kConfig.pipeline_stages> cursor) {
  for (int32_t i = 0; i < kConfig.pipeline_stages; ++i, cursor.advance()) {
    ptx::mbarrier_wait(shared.empty[cursor.stage], cursor.phase ^ 1, "stage empty");
  }
}

}  // namespace uniep::cuda
