#pragma once

#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda::test {

// Copies through the copy engine of each GPU, from the host and back, while this object lives.
class Traffic {
 public:
  explicit Traffic(int devices) {
    const ScopedDevice first(0);
    check(driver().cuMemHostAlloc(&host_, kBytes, CU_MEMHOSTALLOC_PORTABLE), "taking pinned memory");
    for (int device = 0; device < devices; ++device) {
      const ScopedDevice scope(device);
      CUstream stream = nullptr;
      check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      streams_.push_back(stream);
      buffers_.emplace_back(device, static_cast<int64_t>(kBytes));
    }
  }
  ~Traffic() {
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      const ScopedDevice scope(static_cast<int>(i));
      driver().cuStreamSynchronize(streams_[i]);
      driver().cuStreamDestroy(streams_[i]);
    }
    const ScopedDevice first(0);
    driver().cuMemFreeHost(host_);
  }
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  // Some milliseconds of it.
  void go_on() {
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      const ScopedDevice scope(static_cast<int>(i));
      const auto address = reinterpret_cast<CUdeviceptr>(buffers_[i].data());
      check(driver().cuMemcpyHtoDAsync(address, host_, kBytes, streams_[i]), "copying");
      check(driver().cuMemcpyDtoHAsync(host_, address, kBytes, streams_[i]), "copying");
    }
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{64} << 20;
  void* host_ = nullptr;
  std::vector<CUstream> streams_;
  std::vector<DeviceArray> buffers_;
};

}  // namespace uniep::cuda::test
