#pragma once

#include <atomic>
#include <functional>

#include "uniep/error.h"

namespace uniep::internal {

// Counts who is inside of a group's calls, so that any thread may end the group at any time: behind close() no call
// comes in, and the last one inside, close() itself included, runs `release` once. Waits for nobody.
class CallGate {
 public:
  // A call. Throws Error(kTimeout) behind close().
  class Inside {
   public:
    explicit Inside(CallGate& gate) : gate_(gate) {
      ++gate_.inside_;
      if (!gate_.closed_) return;
      gate_.leave();
      throw_closed();
    }
    ~Inside() { gate_.leave(); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    CallGate& gate_;
  };

  [[noreturn]] static void throw_closed() {
    throw Error(Status::kTimeout, "group: aborted; the ranks need a new Group");
  }

  // Before the first call. Must not throw.
  void set_release(std::function<void()> release) { release_ = std::move(release); }

  // False when it was closed before.
  bool close() noexcept {
    ++inside_;
    const bool first = !closed_.exchange(true);
    leave();
    return first;
  }
  const std::atomic<bool>& closed() const { return closed_; }
  bool is_released() const { return released_; }

 private:
  // One order of all operations: who sees the gate open is seen inside by whoever would release.
  void leave() noexcept {
    if (--inside_ == 0 && closed_ && !released_.exchange(true) && release_) release_();
  }

  std::atomic<int> inside_{0};
  std::atomic<bool> closed_{false}, released_{false};
  std::function<void()> release_;
};

}  // namespace uniep::internal
