#pragma once

#include "engine/cuda/device/arguments/gemm_config.h"
#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/memory.h"

// The 16-byte record by which the scheduler warp tells the other roles what is next, and the ring that carries it. A
// ring's record is Task, or LayerTask in the megakernel.
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

template <typename RecordType, int kCount>
struct TaskRing {
  using Record = RecordType;
  static constexpr int kSlots = kCount;
  static_assert(sizeof(Record) == 16, "a record travels as one 16-byte access");

  Record records[kSlots];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
};

// Readers: the loading thread and each math warp.
constexpr uint32_t kTaskReaders = 1 + kMathWarps;

// kCluster 1: a CTA's scheduler serves its own ring. 2: the scheduler of the cluster's first CTA serves both rings, and
// both CTAs' readers hand slots back to it.
template <typename Ring, int kCluster = 1>
class TaskCursor {
 public:
  using Record = typename Ring::Record;

  UNIEP_DEVICE explicit TaskCursor(Ring& ring) : ring_(ring) {}

  // One lane of the scheduler warp; with kCluster 2 a lane a CTA.
  UNIEP_DEVICE void publish(const Record& record, [[maybe_unused]] uint32_t cta = 0) {
    ptx::mbarrier_wait(ring_.empty[slot_], phase_ ^ 1, "task slot empty");
    if constexpr (kCluster == 1) {
      ring_.records[slot_] = record;
      ptx::mbarrier_arrive(ring_.full[slot_]);
    } else {
      const uint32_t full = ptx::cluster_address(ptx::shared_address(&ring_.full[slot_]), cta);
      ptx::mbarrier_arrive_expect_bytes_remote(full, sizeof(Record));
      ptx::store_async_16(ptx::cluster_address(ptx::shared_address(&ring_.records[slot_]), cta),
                          __builtin_bit_cast(ptx::Vector16, record), full);
    }
    advance();
  }

  // Whether a record is there. The same answer in the whole warp.
  UNIEP_DEVICE bool ready() const {
    return ptx::warp_uniform(ptx::mbarrier_test_wait(ring_.full[slot_], phase_) ? 1 : 0) != 0;
  }

  // A single thread.
  UNIEP_DEVICE Record take() {
    ptx::mbarrier_wait(ring_.full[slot_], phase_, "task slot full");
    const Record record = ring_.records[slot_];
    hand_back();
    advance();
    return record;
  }

  // A whole warp.
  UNIEP_DEVICE Record take_by_warp() {
    const Record record = read_by_warp();
    release_by_warp();
    return record;
  }

  // The two halves of take_by_warp, for a reader that still needs what goes with the slot.
  UNIEP_DEVICE Record read_by_warp() {
    ptx::mbarrier_wait(ring_.full[slot_], phase_, "task slot full");
    ptx::Vector16 words = ptx::load_shared_16(ptx::shared_address(&ring_.records[slot_]));
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = ptx::warp_uniform(words.word[i]);
    return __builtin_bit_cast(Record, words);
  }
  UNIEP_DEVICE void release_by_warp() {
    __syncwarp();
    if (ptx::lane_index() == 0) hand_back();
    advance();
  }

  UNIEP_DEVICE uint32_t slot() const {
    return slot_;
  }
  UNIEP_DEVICE uint32_t phase() const {
    return phase_;
  }

 private:
  UNIEP_DEVICE void hand_back() {
    if constexpr (kCluster == 1) {
      ptx::mbarrier_arrive(ring_.empty[slot_]);
    } else {
      ptx::mbarrier_arrive_remote(ring_.empty[slot_], 0);
    }
  }

  UNIEP_DEVICE void advance() {
    slot_ = slot_ + 1 == Ring::kSlots ? 0 : slot_ + 1;
    phase_ ^= slot_ == 0;
  }

  Ring& ring_;
  uint32_t slot_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace uniep::cuda
