#include "engine/cuda/memory/upload_ring.h"

#include <algorithm>
#include <cstring>

#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/side_stream.h"
#include "engine/cuda/runtime/stream_capture.h"

namespace uniep::cuda {
namespace {
constexpr std::size_t kMinBuffer = 64 << 10;
}

UploadRing::~UploadRing() {
  const ScopedDevice scope(device_, std::nothrow);
  for (const Buffer& buffer : buffers_) {
    if (buffer.read == nullptr) continue;
    driver().cuEventSynchronize(buffer.read);
    driver().cuEventDestroy(buffer.read);
    driver().cuMemFreeHost(buffer.memory);
  }
}

void UploadRing::copy(void* target, const void* source, std::size_t bytes, CUstream stream) {
  if (bytes == 0) return;
  const ScopedDevice scope(device_);
  if (is_captured(stream)) return SideStream(device_).write(target, source, bytes);
  Buffer& buffer = buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  if (buffer.read == nullptr) {
    check(driver().cuEventCreate(&buffer.read, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  } else {
    wait_([&] {
      const CUresult result = driver().cuEventQuery(buffer.read);
      if (result != CUDA_ERROR_NOT_READY) check(result, "waiting for an upload");
      return result == CUDA_SUCCESS;
    });
  }
  if (buffer.bytes < bytes) {
    if (buffer.memory != nullptr) driver().cuMemFreeHost(buffer.memory);
    buffer.memory = nullptr;
    buffer.bytes = 0;
    const std::size_t wanted = std::max(kMinBuffer, bytes);
    check(driver().cuMemHostAlloc(&buffer.memory, wanted, CU_MEMHOSTALLOC_PORTABLE), "taking pinned memory");
    buffer.bytes = wanted;
  }
  std::memcpy(buffer.memory, source, bytes);
  check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(target), buffer.memory, bytes, stream),
        "uploading a call");
  check(driver().cuEventRecord(buffer.read, stream), "cuEventRecord");
}

}  // namespace uniep::cuda
