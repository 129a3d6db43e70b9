#pragma once

#include <cuda.h>

#include <memory>
#include <mutex>
#include <vector>

#include "engine/cuda/device/arguments/begin_arguments.h"
#include "engine/cuda/runtime/device_event.h"

namespace uniep::cuda {

// The order of all calls of this process on one GPU, whichever group makes them: kernels that wait for peers must not
// meet on a GPU in one order and on another one in another. Calls in a graph are in the graph's own order.
class DeviceOrder {
 public:
  // The one of a device, made by the first who asks.
  static std::shared_ptr<DeviceOrder> of(int device);

  // While it is held, this thread's call is queued on all its devices and no other.
  static std::unique_lock<std::mutex> lock();

  explicit DeviceOrder(int device) : device_(device) {}

  // Makes a stream wait for the calls that are queued; and the next call for what a stream holds now.
  void follow(CUstream stream) const;
  void lead(CUstream stream) { last_.record(device_, stream); }

  // Where groups on this device keep a note of what it runs. Under the lock.
  void add(CallBoard* board) { boards_.push_back(board); }
  void remove(const CallBoard* board) { std::erase(boards_, board); }
  const std::vector<CallBoard*>& boards() const { return boards_; }

 private:
  int device_;
  DeviceEvent last_;
  std::vector<CallBoard*> boards_;
};

}  // namespace uniep::cuda
