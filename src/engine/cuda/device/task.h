#pragma once

#include "engine/cuda/device/gemm_config.h"
#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/memory.h"

// The 16-byte record by which the scheduler warp tells the other roles what is next, and the ring that carries it.
namespace uniep::cuda {

struct alignas(16) Task {
  static constexpr uint8_t kEnd = 1;      // no more tasks
  static constexpr uint8_t kSharedB = 2;  // load half of B for both CTAs of the cluster
  static constexpr uint8_t kStore = 4;    // the tile exists: write it

  int32_t m_begin;  // forward, dgrad: expert row; wgrad: row of the expert's output
  uint16_t n_block;
  uint16_t k_blocks;
  int32_t k_begin;  // wgrad: the expert's first row
  uint16_t expert;
  uint8_t valid_rows;  // rows of the tile that exist, 0 to 128
  uint8_t flags;

  UNIEP_DEVICE bool has(uint8_t flag) const { return (flags & flag) != 0; }
};
static_assert(sizeof(Task) == 16, "a task travels as one 16-byte access");

struct TaskRing {
  Task slots[kTaskSlots];
  uint64_t full[kTaskSlots];
  uint64_t empty[kTaskSlots];
};

// Readers: the loading thread and each math warp.
constexpr uint32_t kTaskReaders = 1 + kMathWarps;

class TaskCursor {
 public:
  UNIEP_DEVICE explicit TaskCursor(TaskRing& ring) : ring_(ring) {}

  // One lane of the scheduler warp.
  UNIEP_DEVICE void publish(const Task& task) {
    ptx::mbarrier_wait(ring_.empty[slot_], phase_ ^ 1, "task slot empty");
    ring_.slots[slot_] = task;
    ptx::mbarrier_arrive(ring_.full[slot_]);
    advance();
  }

  // A single thread.
  UNIEP_DEVICE Task take() {
    ptx::mbarrier_wait(ring_.full[slot_], phase_, "task slot full");
    const Task task = ring_.slots[slot_];
    ptx::mbarrier_arrive(ring_.empty[slot_]);
    advance();
    return task;
  }

  // A whole warp.
  UNIEP_DEVICE Task take_by_warp() {
    ptx::mbarrier_wait(ring_.full[slot_], phase_, "task slot full");
    ptx::Vector16 words = ptx::load_shared_16(ptx::shared_address(&ring_.slots[slot_]));
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = ptx::warp_uniform(words.word[i]);
    __syncwarp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ring_.empty[slot_]);
    advance();
    return __builtin_bit_cast(Task, words);
  }

 private:
  UNIEP_DEVICE void advance() {
    slot_ = slot_ + 1 == kTaskSlots ? 0 : slot_ + 1;
    phase_ ^= slot_ == 0;
  }

  TaskRing& ring_;
  uint32_t slot_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace uniep::cuda
