#include "engine/cuda/calls/device_order.h"

#include <map>

#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {
namespace {

QueueingTurn& turn() {
  static auto& of_process = *new QueueingTurn;  // never destroyed: threads may wait when the process ends
  return of_process;
}

}  // namespace

void QueueingTurn::lock() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !taken_; });
  taken_ = true;
}

void QueueingTurn::lock(const internal::CallGate& gate) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !taken_ || gate.closed(); });
  if (gate.closed()) internal::CallGate::throw_closed();
  taken_ = true;
}

void QueueingTurn::unlock() noexcept {
  const std::lock_guard lock(mutex_);
  taken_ = false;
  changed_.notify_all();  // of one alone it may be that it leaves
}

void QueueingTurn::look_again() noexcept {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

std::shared_ptr<DeviceOrder> DeviceOrder::of(int device) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<DeviceOrder>> orders;
  const std::lock_guard guard(mutex);
  std::shared_ptr<DeviceOrder> order = orders[device].lock();
  if (order == nullptr) orders[device] = order = std::make_shared<DeviceOrder>(device);
  return order;
}

std::unique_lock<QueueingTurn> DeviceOrder::lock() {
  return std::unique_lock(turn());
}

std::unique_lock<QueueingTurn> DeviceOrder::lock(const internal::CallGate& gate) {
  turn().lock(gate);
  return {turn(), std::adopt_lock};
}

void DeviceOrder::end_waits() noexcept {
  turn().look_again();
}

void DeviceOrder::add(CallBoard* board) {
  const std::lock_guard lock(boards_mutex_);
  boards_.push_back(board);
}

void DeviceOrder::remove(const CallBoard* board) {
  const std::lock_guard lock(boards_mutex_);
  std::erase(boards_, board);
}

void DeviceOrder::follow(CUstream stream) const {
  if (!last_) return;
  const ScopedDevice scope(device_);
  check(driver().cuStreamWaitEvent(stream, last_.get(), 0), "cuStreamWaitEvent");
}

}  // namespace uniep::cuda
