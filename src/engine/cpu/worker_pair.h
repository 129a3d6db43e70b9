#pragma once

#include <atomic>
#include <limits>
#include <optional>

#include "program/stage.h"

namespace uniep::cpu {

// A cluster: two workers that walk the compute list together. As on a GPU, where one scheduler serves both CTAs, the
// first of them takes what the two do next, waits until both can begin, and hands the second its tile. It may be a few
// tiles ahead of the second, and takes nothing before the second has come to the list. A pair serves one launch.
class WorkerPair {
 public:
  static constexpr uint32_t kMaxAhead = 4;

  // By the first worker; for hand_over() there must be room: room() > handed().
  void hand_over(const Task& task) {
    const uint32_t index = handed_.load(std::memory_order_relaxed);
    slots_[index % kMaxAhead] = task;
    handed_.store(index + 1, std::memory_order_release);
  }
  void end() {
    tiles_ = handed_.load(std::memory_order_relaxed);
    handed_.store(kEnded, std::memory_order_release);
  }

  // By the second worker. What it takes must have been handed over: handed() > taken(). None at the end.
  void come() { room_.store(kMaxAhead, std::memory_order_release); }
  std::optional<Task> take() {
    const bool ended = handed_.load(std::memory_order_acquire) == kEnded;
    if (ended && taken_ == tiles_) return std::nullopt;
    const Task task = slots_[taken_ % kMaxAhead];
    ++taken_;
    room_.store(taken_ + kMaxAhead, std::memory_order_release);
    return task;
  }

  std::atomic<uint32_t>& handed() { return handed_; }
  std::atomic<uint32_t>& room() { return room_; }
  uint32_t taken() const { return taken_; }

 private:
  static constexpr uint32_t kEnded = std::numeric_limits<uint32_t>::max();

  std::atomic<uint32_t> handed_{0};  // tiles, or kEnded
  std::atomic<uint32_t> room_{0};    // tiles that may be handed over in all
  Task slots_[kMaxAhead]{};
  uint32_t tiles_ = 0;  // in all, once handed_ is kEnded
  uint32_t taken_ = 0;  // the second worker's own
};

}  // namespace uniep::cpu
