#include "engine/cuda/runtime/side_stream.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

constexpr std::chrono::seconds kLongest{10};
constexpr std::chrono::microseconds kPause{20};

}  // namespace

SideStream::SideStream(int device) : device_(device) {
  const ScopedDevice scope(device_);
  check(driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

SideStream::~SideStream() {
  if (stream_ == nullptr) return;
  const ScopedDevice scope(device_, std::nothrow);
  loaded_driver().cuStreamDestroy(stream_);
}

SideStream::SideStream(SideStream&& other) noexcept
    : device_(other.device_), stream_(std::exchange(other.stream_, nullptr)) {}

void SideStream::clear(void* memory, std::size_t bytes) {
  const ScopedDevice scope(device_);
  check(driver().cuMemsetD8Async(device_pointer(memory), 0, bytes, stream_), "clearing memory");
  wait();
}

// No memset: that is a kernel, and beside one of ours on all SMs, whose wait this may end, it would not begin.
void SideStream::store(uint32_t* word, uint32_t value) {
  write(word, &value, sizeof(value));
}

void SideStream::read(void* host, const void* memory, std::size_t bytes) {
  const ScopedDevice scope(device_);
  check(driver().cuMemcpyDtoHAsync(host, device_pointer(memory), bytes, stream_), "reading memory");
  wait();
}

void SideStream::write(void* memory, const void* host, std::size_t bytes) {
  const ScopedDevice scope(device_);
  check(driver().cuMemcpyHtoDAsync(device_pointer(memory), host, bytes, stream_), "writing memory");
  wait();
}

void SideStream::wait() {
  const auto limit = std::chrono::steady_clock::now() + kLongest;
  for (;;) {
    const CUresult result = driver().cuStreamQuery(stream_);
    if (result != CUDA_ERROR_NOT_READY) return check(result, "waiting for a device");
    if (std::chrono::steady_clock::now() > limit) {
      throw Error(Status::kTimeout, "device " + std::to_string(device_) + " does not answer");
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace uniep::cuda
