#pragma once

#include <cstddef>
#include <cstdint>

namespace uniep::internal {

// Hands out aligned pieces of a block; with a null block it only counts, so that sizes and pointers can not disagree.
class Carver {
 public:
  explicit Carver(std::byte* block) : block_(block) {}
  template <typename T>
  T* take(int64_t count) {
    constexpr std::size_t kAlignment = 64;
    T* piece = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

}  // namespace uniep::internal
