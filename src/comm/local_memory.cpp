#include <algorithm>
#include <set>
#include <string>

#include "comm/device_wait.h"
#include "comm/memory_reclaimer.h"
#include "comm/symmetric_memory.h"
#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using cuda::check;
using cuda::driver;
using cuda::ScopedDevice;

void allow_peer_access(int device, int peer) {
  int allowed = 0;
  check(driver().cuDeviceCanAccessPeer(&allowed, device, peer), "cuDeviceCanAccessPeer");
  if (allowed == 0) {
    throw Error(Status::kUnsupported, "device " + std::to_string(device) + " can not reach the memory of device " +
                                          std::to_string(peer) + "; local ranks need NVLink or PCIe peer access");
  }
  CUcontext peer_context = nullptr;
  {
    const ScopedDevice scope(peer);
    check(driver().cuCtxGetCurrent(&peer_context), "cuCtxGetCurrent");
  }
  const ScopedDevice scope(device);
  const CUresult result = driver().cuCtxEnablePeerAccess(peer_context, 0);
  if (result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) check(result, "cuCtxEnablePeerAccess");
}

class LocalMemory final : public SymmetricMemory {
 public:
  LocalMemory(const std::vector<int>& devices, int64_t bytes, double wait_seconds)
      : devices_(devices), bytes_(bytes), wait_seconds_(wait_seconds) {
    const std::set<int> distinct(devices.begin(), devices.end());
    for (const int device : distinct) {
      for (const int peer : distinct) {
        if (peer != device) allow_peer_access(device, peer);
      }
    }
    for (size_t rank = 0; rank < devices.size(); ++rank) own_ranks_.push_back(static_cast<int>(rank));
    try {
      take();
    } catch (...) {
      release();
      throw;
    }
  }
  ~LocalMemory() override { release(); }

  int ranks() const override { return static_cast<int>(devices_.size()); }
  int64_t bytes() const override { return bytes_; }
  const std::vector<int>& own_ranks() const override { return own_ranks_; }
  int device(int own_rank) const override { return devices_.at(static_cast<size_t>(own_rank)); }
  void* address(int /*own_rank*/, int peer) const override {
    return reinterpret_cast<void*>(addresses_.at(static_cast<size_t>(peer)));
  }
  void barrier() override {
    for (const int device : std::set<int>(devices_.begin(), devices_.end())) {
      wait_for_device(device, Deadline(wait_seconds_), "a local rank");
    }
  }

 private:
  void take() {
    addresses_.reserve(devices_.size());
    for (const int device : devices_) {
      const ScopedDevice scope(device);
      CUdeviceptr address = 0;
      const auto bytes = static_cast<size_t>(bytes_);
      check(allocate_or_reclaim(device, [&] { return driver().cuMemAlloc(&address, bytes); }),
            "allocating symmetric memory");
      addresses_.push_back(address);
      check(driver().cuMemsetD8Async(address, 0, bytes, nullptr), "clearing symmetric memory");
      check(driver().cuCtxSynchronize(), "clearing symmetric memory");
    }
  }
  void release() {
    for (size_t rank = 0; rank < addresses_.size(); ++rank) {
      const ScopedDevice scope(devices_[rank], std::nothrow);
      driver().cuMemFree(addresses_[rank]);
    }
    addresses_.clear();
  }

  const std::vector<int> devices_;
  const int64_t bytes_;
  const double wait_seconds_;
  std::vector<int> own_ranks_;
  std::vector<CUdeviceptr> addresses_;
};

}  // namespace

std::unique_ptr<SymmetricMemory> make_local_symmetric_memory(const std::vector<int>& devices, int64_t bytes,
                                                             double wait_seconds) {
  if (devices.empty() || bytes <= 0) {
    throw Error(Status::kInvalidArgument, "symmetric memory needs at least one rank and one byte");
  }
  const int count = cuda::device_count();
  for (const int device : devices) {
    if (device < 0 || device >= count) {
      throw Error(Status::kInvalidArgument,
                  "device " + std::to_string(device) + " does not exist: there are " + std::to_string(count));
    }
  }
  return std::make_unique<LocalMemory>(devices, bytes, wait_seconds);
}

}  // namespace uniep
