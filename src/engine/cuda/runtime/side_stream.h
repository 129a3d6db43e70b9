#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace uniep::cuda {

// A stream of the library's own on one device, which follows nobody's: for short work beside what callers have queued,
// whose end the host may wait for whatever they do.
class SideStream {
 public:
  explicit SideStream(int device);
  ~SideStream();
  SideStream(SideStream&& other) noexcept;
  SideStream& operator=(SideStream&&) = delete;

  int device() const { return device_; }

  // Each waits until it is done. Throws Error(kTimeout) when that lasts longer than short work can.
  void clear(void* memory, std::size_t bytes);
  void store(uint32_t* word, uint32_t value);
  void read(void* host, const void* memory, std::size_t bytes);
  void write(void* memory, const void* host, std::size_t bytes);

 private:
  void wait();

  int device_;
  CUstream stream_ = nullptr;
};

}  // namespace uniep::cuda
