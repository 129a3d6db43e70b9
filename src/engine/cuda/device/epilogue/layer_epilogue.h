#pragma once

#include "engine/cuda/device/epilogue/epilogue_swiglu.h"
#include "engine/cuda/device/epilogue/tile_bias.h"
#include "engine/cuda/device/shared_memory/layer_storage.h"

namespace uniep::cuda {

// The epilogue of FC1 and FC2, and of dgrad FC1 (see epilogue.h): the accumulators are rounded at once; what is left is
// deferred epilogue, and which it is depends on the tile. FC1: strips of 16 columns of gate and up, as SwigluEpilogue.
// Without a gate 32 columns of z.
// FC2: 32 columns a step, stored in runs of 64: straight into the slots of the ranks that the rows came from, or into
// output_rows. What a step needs to know lies in shared memory: the registers are full.
//
// A tile's deferred epilogue is done between the K blocks of the next one, or by flush() where the next one is not
// there yet: it may wait for this very tile. After the last step the warp arrives at the tile's `stored` barrier.
template <LayerKernelConfig kLayer>
class LayerEpilogue {
 public:
  static constexpr int kCount = kLayer.gemm.tile_n / 2;
  static constexpr int kSteps = deferred_steps(kLayer.gemm);
  static constexpr bool kRolled = true;
  static constexpr int32_t kStepColumns = 32;  // of FC2
  static_assert(kSteps * kStepColumns == kLayer.gemm.tile_n, "the steps do all columns");
  static_assert(2 * kStepColumns == kBlockColumns && kSteps % 2 == 0, "two steps fill a block");

  UNIEP_DEVICE LayerEpilogue(LayerStorage<kLayer>& shared, int32_t math_warp)
      : shared_(shared), math_warp_(math_warp) {}

  // Before its mainloop, too: its biases come once the deferred epilogue leaves the staging.
  UNIEP_DEVICE void begin(uint32_t slot) const {
    if constexpr (Bias::kExists) {
      if (ptx::lane_index() == 0) deferred().next_slot = slot;
      __syncwarp();
      if (steps_left_ == 0) fetch_bias(slot);
    }
  }

  // The tile in slot `slot` of the task ring.
  UNIEP_DEVICE void finish(uint32_t slot, const float (&d)[kCount]) {
    const Bias bias(staging());  // waits for them alone: the rows below are asked for behind it
    const LayerTask task =
        __builtin_bit_cast(LayerTask, ptx::load_shared_16(ptx::shared_address(&shared_.tasks.records[slot])));
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    if (lane < kBlockRows) {
      const bool exists = row_in_tile() + lane < task.valid_rows;
      ptx::copy_async_16(ptx::shared_address(&deferred().rows[lane]),
                         shared_.call.program.rows + task.row + row_in_tile() + lane, exists);
    }
    ptx::copy_async_commit();
    if (lane == 0) {
      deferred().task = task;
      deferred().slot = slot;
      if constexpr (Bias::kExists) deferred().next_slot = kNoSlot;
    }
    steps_left_ = kSteps;
    if (!kHasGateAndUp<kLayer> || is_second(task)) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) rounded_[i] = bias.rounded(d, 2 * i);
    } else {  // a step's gate columns, then its up columns
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int from = i % 8 / 4 * (kCount / 2) + i / 8 * 8 + i % 4 * 2;
        rounded_[i] = bias.rounded(d, from);
      }
    }
  }

  // Always rotates, so that there is one way through it: else the compiler spills a rotation for each.
  UNIEP_DEVICE void step(const WarpTile& /*next*/) {
    if (steps_left_ > 0) one_step();
    rotate_registers<8>(rounded_);
  }

  UNIEP_DEVICE void flush() {
#pragma unroll 1
    while (steps_left_ > 0) step(WarpTile{});
  }

 private:
  using Bias = TileBias<kLayer>;
  static constexpr uint32_t kNoSlot = ~0u;  // flush() runs before the next tile is known

  UNIEP_DEVICE static bool is_second(const LayerTask& task) {
    return has_second_gradient(kLayer.gemms) || task.has(LayerTask::kSecond);
  }
  UNIEP_DEVICE int32_t row_in_tile() const {
    return math_warp_ * kBlockRows;
  }
  UNIEP_DEVICE DeferredTile& deferred() const {
    return shared_.deferred[math_warp_];
  }
  UNIEP_DEVICE uint32_t staging() const {
    return ptx::shared_address(shared_.staging[math_warp_]);
  }

  UNIEP_DEVICE void one_step() {
    if (steps_left_ == kSteps) {
      ptx::copy_async_wait<0>();
      __syncwarp();
    }
    disturb(running_call(shared_), DisturbedAt::kTile);
    const LayerTask task = __builtin_bit_cast(LayerTask, ptx::load_shared_16(ptx::shared_address(&deferred().task)));
    if (task.has(LayerTask::kStore)) {
      if (is_second(task)) {
        second_step(task);
      } else if constexpr (kHasGateAndUp<kLayer>) {
        first_step(task);
      } else {
        first_step_without_gate(task);
      }
    }
    if (--steps_left_ > 0) return;
    // Read before the warp meets: lane 0 may write the next one right behind it.
    uint32_t next_slot = kNoSlot;
    if constexpr (Bias::kExists) next_slot = deferred().next_slot;
    __syncwarp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared_.stored[deferred().slot]);
    if constexpr (Bias::kExists) {
      if (next_slot != kNoSlot) fetch_bias(next_slot);
    }
  }

  UNIEP_DEVICE void fetch_bias(uint32_t slot) const {
    Bias::fetch(__builtin_bit_cast(LayerTask, ptx::load_shared_16(ptx::shared_address(&shared_.tasks.records[slot]))),
                shared_.call, staging());
  }

  UNIEP_DEVICE void first_step(const LayerTask& task) {
    const int32_t done = (kSteps - steps_left_) * kStripColumns;
    if (done >= task.columns()) return;
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    const float prob[2] = {deferred().rows[lane / 4].prob, deferred().rows[lane / 4 + 8].prob};
    stage_swiglu_strip<kLayer.gemm.expert>(staging(), rounded_, rounded_ + 4, prob);
    const int32_t column = done + lane % 2 * kChunkColumns;
    if (column < task.columns()) {
      const RankCall& call = shared_.call;
      const int64_t width = call.intermediate;
      const int32_t row = row_in_tile() + lane / 2;
      const int64_t offset = (task.row + row) * width + task.column() + column;
      BFloat16* const gate = call.z == nullptr ? nullptr : call.z + (task.row + row) * width + offset;
      write_swiglu_strip(staging(), row < task.valid_rows, gate, width, call.activation + offset);
    }
    __syncwarp();
  }

  // Two strips of z, and the same of a.
  UNIEP_DEVICE void first_step_without_gate(const LayerTask& task) {
    static_assert(4 * kStripBytes <= kStagingBlockBytes && 2 * kStripColumns == kStepColumns);
    const int32_t done = (kSteps - steps_left_) * kStepColumns;
    if (done >= task.columns()) return;
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    const float prob[2] = {deferred().rows[lane / 4].prob, deferred().rows[lane / 4 + 8].prob};
#pragma unroll
    for (int strip = 0; strip < 2; ++strip) {
      const uint32_t* const z = rounded_ + 4 * strip;
      uint32_t a[4];
      activate_fragments<kLayer.gemm.expert>(z, nullptr, prob, a);
      put_strip(staging() + strip * kStripBytes, z[0], z[1], z[2], z[3]);
      put_strip(staging() + (2 + strip) * kStripBytes, a[0], a[1], a[2], a[3]);
    }
    __syncwarp();
    const RankCall& call = shared_.call;
    const int32_t row = row_in_tile() + lane / 2;
#pragma unroll
    for (int strip = 0; strip < 2; ++strip) {
      const int32_t column = done + strip * kStripColumns + lane % 2 * kChunkColumns;
      if (column >= task.columns()) break;
      const int64_t offset = (task.row + row) * call.intermediate + task.column() + column;
      const bool exists = row < task.valid_rows;
      if (call.z != nullptr) {
        ptx::store_global_16(call.z + offset, strip_values(staging() + strip * kStripBytes, exists));
      }
      ptx::store_global_16(call.activation + offset, strip_values(staging() + (2 + strip) * kStripBytes, exists));
    }
    __syncwarp();
  }

  UNIEP_DEVICE void second_step(const LayerTask& task) {
    const int32_t half = (kSteps - steps_left_) % 2;
    const int32_t done = (kSteps - steps_left_ - half) * kStepColumns;
    if (done >= task.columns()) return;
    put_fragment(staging(), 2 * half, rounded_);
    put_fragment(staging(), 2 * half + 1, rounded_ + 4);
    __syncwarp();
    if (half == 1) write_run(task, done);
  }

  // Where a row of FC2 goes, at column 0; null: nowhere.
  UNIEP_DEVICE BFloat16* target_of(const LayerTask& task, int32_t row) const {
    const RankCall& call = shared_.call;
    if (row_in_tile() + row >= task.valid_rows) return nullptr;
    if (kLayer.combine != CombineKind::kEpilogue)
      return call.output_rows + (task.row + row_in_tile() + row) * call.hidden;
    const RowSource source = deferred().rows[row];
    if (source.rank < 0) return nullptr;
    const int64_t slot = static_cast<int64_t>(source.token) * call.slot_count + source.slot;
    return call.slot_rows[source.rank] + slot * call.hidden;
  }

  UNIEP_DEVICE void write_run(const LayerTask& task, int32_t done) {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    const int32_t column = done + lane % 8 * kChunkColumns;
    if (column < task.columns()) {
#pragma unroll
      for (int32_t step = 0; step < kBlockRows / 4; ++step) {
        const int32_t row = step * 4 + lane / 8;
        BFloat16* const target = target_of(task, row);
        if (target != nullptr) {
          ptx::Vector16 values = ptx::load_shared_16(block_chunk(staging(), row, lane % 8));
          if constexpr (kLayer.gemm.expert.weighs_output) weigh(values, deferred().rows[row].prob);
          ptx::store_global_16(target + task.column() + column, values);
        }
      }
    }
    __syncwarp();
  }

  // p o from the rounded o, rounded again.
  UNIEP_DEVICE static void weigh(ptx::Vector16& values, float prob) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t o = values.word[i];
      values.word[i] = pack_bfloat16(mul(prob, unpack_low(o)), mul(prob, unpack_high(o)));
    }
  }

  LayerStorage<kLayer>& shared_;
  const int32_t math_warp_;
  int32_t steps_left_ = 0;
  uint32_t rounded_[kCount / 2];
};

}  // namespace uniep::cuda
