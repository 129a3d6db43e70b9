#include "engine/cuda/runtime/device_array.h"

#include <algorithm>
#include <set>
#include <utility>

#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {
namespace {}  // namespace

DeviceArray::DeviceArray(int device, int64_t bytes) : device_(device), bytes_(bytes) {
  const ScopedDevice scope(device);
  CUdeviceptr address = 0;
  check(driver().cuMemAlloc(&address, static_cast<size_t>(std::max<int64_t>(bytes, 16))), "taking device memory");
  memory_ = reinterpret_cast<void*>(address);
}

DeviceArray::DeviceArray(int device, const void* values, int64_t bytes) : DeviceArray(device, bytes) {
  if (bytes == 0) return;
  const ScopedDevice scope(device);
  check(driver().cuMemcpyHtoDAsync(device_pointer(memory_), values, static_cast<size_t>(bytes), nullptr),
        "uploading an array");
  check(driver().cuCtxSynchronize(), "uploading an array");
}

DeviceArray::~DeviceArray() {
  if (memory_ == nullptr) return;
  const ScopedDevice scope(device_, std::nothrow);
  loaded_driver().cuMemFree(device_pointer(memory_));
}

DeviceArray::DeviceArray(DeviceArray&& other) noexcept {
  *this = std::move(other);
}

DeviceArray& DeviceArray::operator=(DeviceArray&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceArray::fill(unsigned char byte) const {
  if (bytes_ == 0) return;
  const ScopedDevice scope(device_);
  check(driver().cuMemsetD8Async(device_pointer(memory_), byte, static_cast<size_t>(bytes_), nullptr),
        "filling an array");
  check(driver().cuCtxSynchronize(), "filling an array");
}

void DeviceArray::read_device(int device, const void* memory, void* values, int64_t bytes) {
  if (bytes == 0) return;
  const ScopedDevice scope(device);
  check(driver().cuMemcpyDtoHAsync(values, device_pointer(memory), static_cast<size_t>(bytes), nullptr),
        "reading an array");
  check(driver().cuCtxSynchronize(), "reading an array");
}

DeviceTimer::DeviceTimer(const std::vector<int>& devices) {
  for (const int device : std::set<int>(devices.begin(), devices.end())) {
    const ScopedDevice scope(device);
    CUevent begin = nullptr, end = nullptr;
    check(driver().cuEventCreate(&begin, 0), "cuEventCreate");
    check(driver().cuEventCreate(&end, 0), "cuEventCreate");
    devices_.push_back({device, begin, end});
  }
}

DeviceTimer::~DeviceTimer() {
  for (const Device& of : devices_) {
    const ScopedDevice scope(of.device, std::nothrow);
    loaded_driver().cuEventDestroy(static_cast<CUevent>(of.begin));
    loaded_driver().cuEventDestroy(static_cast<CUevent>(of.end));
  }
}

void DeviceTimer::start() {
  for (const Device& of : devices_) {
    const ScopedDevice scope(of.device);
    check(driver().cuEventRecord(static_cast<CUevent>(of.begin), nullptr), "cuEventRecord");
  }
}

void DeviceTimer::stop() {
  for (const Device& of : devices_) {
    const ScopedDevice scope(of.device);
    check(driver().cuEventRecord(static_cast<CUevent>(of.end), nullptr), "cuEventRecord");
  }
}

double DeviceTimer::milliseconds() {
  float longest = 0;
  for (const Device& of : devices_) {
    const ScopedDevice scope(of.device);
    float elapsed = 0;
    check(driver().cuEventSynchronize(static_cast<CUevent>(of.end)), "waiting for the measured work");
    check(driver().cuEventElapsedTime(&elapsed, static_cast<CUevent>(of.begin), static_cast<CUevent>(of.end)),
          "cuEventElapsedTime");
    longest = std::max(longest, elapsed);
  }
  return longest;
}

}  // namespace uniep::cuda
