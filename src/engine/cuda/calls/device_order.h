#pragma once

#include <cuda.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/call_gate.h"
#include "engine/cuda/device/arguments/begin_arguments.h"
#include "engine/cuda/runtime/device_event.h"

namespace uniep::cuda {

// One thread's turn to queue calls. Not a mutex: who waits for it leaves when its group is aborted.
class QueueingTurn {
 public:
  void lock();
  // Throws Error(kTimeout) behind the gate's close(), also if that comes while it waits.
  void lock(const internal::CallGate& gate);
  void unlock() noexcept;
  // Behind a gate's close(): who waits looks at it.
  void look_again() noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool taken_ = false;
};

// The order of all calls of this process on one GPU, whichever group makes them: kernels that wait for peers must not
// meet on a GPU in one order and on another one in another. Calls in a graph are in the graph's own order.
class DeviceOrder {
 public:
  // The one of a device, made by the first who asks.
  static std::shared_ptr<DeviceOrder> of(int device);

  // While it is held, this thread's call is queued on all its devices and no other.
  static std::unique_lock<QueueingTurn> lock();
  // Of a call in a group's gate: throws as that does behind its close().
  static std::unique_lock<QueueingTurn> lock(const internal::CallGate& gate);
  // Behind the close() of a gate.
  static void end_waits() noexcept;

  explicit DeviceOrder(int device) : device_(device) {}

  // Makes a stream wait for the calls that are queued; and the next call for what a stream holds now.
  void follow(CUstream stream) const;
  void lead(CUstream stream) { last_.record(device_, stream); }

  // Where groups on this device keep a note of what it runs. A lock of their own: a group may end inside of another
  // one's call, where a caller's function makes room.
  void add(CallBoard* board);
  void remove(const CallBoard* board);
  // use(boards), and none goes meanwhile.
  template <typename Use>
  void with_boards(Use&& use) const {
    const std::lock_guard lock(boards_mutex_);
    use(boards_);
  }

 private:
  int device_;
  DeviceEvent last_;
  mutable std::mutex boards_mutex_;
  std::vector<CallBoard*> boards_;
};

}  // namespace uniep::cuda
