#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace uniep::io {

// Dimensions that a tensor in a file may have: bounds what a hostile header can make a reader allocate.
constexpr std::size_t kMaxDimensions = 32;

// The number of elements of a shape (1 for no dimensions). Nothing if a dimension is negative or the product of the
// non-zero dimensions does not fit into 63 bits, even where another dimension is zero.
inline std::optional<int64_t> element_count(std::span<const int64_t> shape) {
  int64_t product = 1;
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, extent, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : product;
}

// "[3, 4]", for messages.
inline std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace uniep::io
