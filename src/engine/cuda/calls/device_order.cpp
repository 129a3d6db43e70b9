#include "engine/cuda/calls/device_order.h"

#include <map>

#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {

std::shared_ptr<DeviceOrder> DeviceOrder::of(int device) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<DeviceOrder>> orders;
  const std::lock_guard guard(mutex);
  std::shared_ptr<DeviceOrder> order = orders[device].lock();
  if (order == nullptr) orders[device] = order = std::make_shared<DeviceOrder>(device);
  return order;
}

std::unique_lock<std::mutex> DeviceOrder::lock() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

void DeviceOrder::follow(CUstream stream) const {
  if (!last_) return;
  const ScopedDevice scope(device_);
  check(driver().cuStreamWaitEvent(stream, last_.get(), 0), "cuStreamWaitEvent");
}

}  // namespace uniep::cuda
