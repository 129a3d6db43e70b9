#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <functional>
#include <utility>

namespace uniep::cuda {

// Copies from the host to a device in stream order without waiting for them: through pinned buffers that are used in
// turn. The host waits only when all of them are still being read.
class UploadRing {
 public:
  using Wait = std::function<void(const std::function<bool()>&)>;

  // `wait`: returns once what it is given is true, or throws.
  UploadRing(int device, Wait wait) : device_(device), wait_(std::move(wait)) {}
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  // `source` may be reused at once. In a capture the bytes are there at once, and not again at a replay: `target` must
  // be used by nothing else.
  void copy(void* target, const void* source, std::size_t bytes, CUstream stream);

 private:
  struct Buffer {
    void* memory = nullptr;
    std::size_t bytes = 0;
    CUevent read = nullptr;
  };

  int device_;
  Wait wait_;
  std::array<Buffer, 16> buffers_;
  std::size_t next_ = 0;
};

}  // namespace uniep::cuda
