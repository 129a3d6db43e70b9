#pragma once

#include <memory>
#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/traffic_arguments.h"

namespace uniep::cuda::test {

// Copies within each GPU's memory, by SMs that small layers leave free, while this object lives: loads and stores of
// the layer then take several times as long. (Traffic is of the copy engines, and of the host's link.)
class MemoryTraffic {
 public:
  explicit MemoryTraffic(int devices) {
    for (int device = 0; device < devices; ++device) {
      const ScopedDevice scope(device);
      CUstream stream = nullptr;
      check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      streams_.push_back(stream);
      buffers_.emplace_back(device, 2 * kBytes);
      kernels_.push_back(std::make_unique<Kernels>(device, kernel_folder()));
    }
  }
  ~MemoryTraffic() {
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      const ScopedDevice scope(static_cast<int>(i));
      driver().cuStreamSynchronize(streams_[i]);
      driver().cuStreamDestroy(streams_[i]);
    }
  }
  MemoryTraffic(const MemoryTraffic&) = delete;
  MemoryTraffic& operator=(const MemoryTraffic&) = delete;

  static KernelRequest request() { return Kernels::request(kernel_folder(), kFile, kFunction); }

  // Some milliseconds of it, where there is none left.
  void go_on() {
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      const ScopedDevice scope(static_cast<int>(i));
      if (driver().cuStreamQuery(streams_[i]) == CUDA_ERROR_NOT_READY) continue;
      auto* const source = static_cast<uint8_t*>(buffers_[i].data());
      kernels_[i]->run(kFile, kFunction,
                       {.grid_x = kCtas, .threads = 1024, .shared_bytes = kBytesOfAnSm, .stream = streams_[i]},
                       TrafficArguments{source, source + kBytes, kBytes / 16, kNanoseconds});
    }
  }

 private:
  static constexpr const char* kFile = "traffic_kernels.cu";
  static constexpr const char* kFunction = "test_traffic";
  static constexpr int64_t kBytes = int64_t{256} << 20;  // of a buffer: more than caches hold
  static constexpr int kCtas = 48;                       // four ranks of 16 CTAs have their SMs beside them
  static constexpr int kBytesOfAnSm = 160 << 10;         // one CTA an SM
  static constexpr uint64_t kNanoseconds = 20'000'000;

  std::vector<CUstream> streams_;
  std::vector<DeviceArray> buffers_;
  std::vector<std::unique_ptr<Kernels>> kernels_;
};

}  // namespace uniep::cuda::test
