#pragma once

#include <cuda.h>

namespace uniep::cuda {

// A point of a stream that the host may wait for. Made by the first record().
class DeviceEvent {
 public:
  DeviceEvent() = default;
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  explicit operator bool() const { return event_ != nullptr; }
  CUevent get() const { return event_; }

  void record(int device, CUstream stream);
  void wait() const;
  bool is_over() const;

 private:
  CUevent event_ = nullptr;
};

}  // namespace uniep::cuda
