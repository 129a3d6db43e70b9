#pragma once

#include <map>
#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "engine/cuda/runtime/driver.h"
#include "uniep/group.h"

namespace uniep::cuda::test {

// Counts the bytes of each rank. A block that goes back is poisoned in the order of the stream that it goes back on, so
// that whoever still reads it gives other bytes. No memory is handed out twice.
class CountingAllocator {
 public:
  // Rank r on devices[r mod size]; without any, on device r.
  explicit CountingAllocator(std::vector<int> devices) : devices_(std::move(devices)) {}

  Allocator allocator() { return {allocate, release, this}; }
  std::size_t requested(int rank) { return requested_[rank]; }
  std::size_t live(int rank) { return live_[rank]; }
  std::size_t all_live() const {
    std::size_t all = 0;
    for (const auto& [rank, bytes] : live_) all += bytes;
    return all;
  }

 private:
  int device_of(int rank) const {
    return devices_.empty() ? rank : devices_[static_cast<std::size_t>(rank) % devices_.size()];
  }

  static void* allocate(void* context, std::size_t bytes, std::size_t /*alignment*/, int rank, Stream /*stream*/) {
    auto& own = *static_cast<CountingAllocator*>(context);
    own.requested_[rank] += bytes;
    own.live_[rank] += bytes;
    return own.blocks_.emplace_back(own.device_of(rank), static_cast<int64_t>(bytes)).data();
  }
  static void release(void* context, void* memory, std::size_t bytes, int rank, Stream stream) {
    auto& own = *static_cast<CountingAllocator*>(context);
    own.live_[rank] -= bytes;
    const ScopedDevice scope(own.device_of(rank));
    driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0xff, bytes, static_cast<CUstream>(stream.handle));
  }

  std::vector<int> devices_;
  std::map<int, std::size_t> requested_, live_;
  std::vector<DeviceArray> blocks_;
};

}  // namespace uniep::cuda::test
