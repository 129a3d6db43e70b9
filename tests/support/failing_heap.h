#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

// A heap that runs out. It replaces operator new of the program: include it in one source.
namespace uniep::test {

// The heap of this program, the library's requests included: the k-th request from now on fails where k is not 0.
inline std::atomic<int64_t> heap_countdown{0};
inline std::atomic<int64_t> heap_live{0};
inline std::atomic<bool> heap_failed{false};

inline void* heap_request(std::size_t bytes, std::size_t alignment) {
  if (heap_countdown.load(std::memory_order_relaxed) > 0 &&
      heap_countdown.fetch_sub(1, std::memory_order_relaxed) == 1) {
    heap_failed.store(true);
    throw std::bad_alloc();
  }
  void* const memory = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  heap_live.fetch_add(1, std::memory_order_relaxed);
  return memory;
}
inline void heap_return(void* memory) {
  if (memory == nullptr) return;
  heap_live.fetch_sub(1, std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace uniep::test

void* operator new(std::size_t bytes) {
  return uniep::test::heap_request(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return uniep::test::heap_request(bytes, static_cast<std::size_t>(alignment));
}
// Sanitizers have these of their own.
void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  try {
    return uniep::test::heap_request(bytes, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t& /*tag*/) noexcept {
  try {
    return uniep::test::heap_request(bytes, static_cast<std::size_t>(alignment));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept {
  uniep::test::heap_return(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  uniep::test::heap_return(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  uniep::test::heap_return(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  uniep::test::heap_return(memory);
}
