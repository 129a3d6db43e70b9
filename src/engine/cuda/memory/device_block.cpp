#include "engine/cuda/memory/device_block.h"

#include <string>
#include <utility>

#include "comm/memory_reclaimer.h"
#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {

DeviceBlock::DeviceBlock(int device, std::size_t bytes, const char* purpose) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const ScopedDevice scope(device);
  CUdeviceptr address = 0;
  const CUresult result = allocate_or_reclaim(device, [&] { return driver().cuMemAlloc(&address, bytes); });
  if (result != CUDA_SUCCESS) {  // the text takes memory, too
    check(
        result,
        ("taking " + std::to_string(bytes) + " bytes of device " + std::to_string(device) + " for " + purpose).c_str());
  }
  memory_ = reinterpret_cast<std::byte*>(address);
}

DeviceBlock::~DeviceBlock() {
  if (memory_ == nullptr) return;
  const ScopedDevice scope(device_, std::nothrow);
  driver().cuMemFree(reinterpret_cast<CUdeviceptr>(memory_));
}

DeviceBlock::DeviceBlock(DeviceBlock&& other) noexcept {
  *this = std::move(other);
}

DeviceBlock& DeviceBlock::operator=(DeviceBlock&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace uniep::cuda
