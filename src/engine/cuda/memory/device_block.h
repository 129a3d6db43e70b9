#pragma once

#include <cstddef>

namespace uniep::cuda {

// Memory of a device that goes with its owner. Freeing waits for the device.
class DeviceBlock {
 public:
  DeviceBlock() = default;
  // Throws uniep::Error (kOutOfMemory) that names `purpose`.
  DeviceBlock(int device, std::size_t bytes, const char* purpose);
  ~DeviceBlock();
  DeviceBlock(DeviceBlock&& other) noexcept;
  DeviceBlock& operator=(DeviceBlock&& other) noexcept;

  std::byte* data() const { return memory_; }
  std::size_t size() const { return bytes_; }

 private:
  int device_ = 0;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace uniep::cuda
