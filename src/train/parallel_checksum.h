#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "io/checksum.h"
#include "reference/parallel.h"

namespace uniep::train {

// part(begin, end) of all of [0, count), added by all cores.
template <typename Part>
uint64_t sum_of_parts(int64_t count, const Part& part) {
  constexpr int64_t kPart = int64_t{1} << 20;
  constexpr double kWork = 10;  // flops that an element's hash is like
  std::atomic<uint64_t> sum{0};
  reference::parallel_for((count + kPart - 1) / kPart, kWork * static_cast<double>(count), [&](int64_t i) {
    const int64_t begin = i * kPart;
    sum += part(begin, std::min(count, begin + kPart));
  });
  return sum;
}

// io::checksum() by all cores.
template <typename T>
uint64_t parallel_checksum(const T* values, int64_t count, uint64_t first_index = 0) {
  return sum_of_parts(count, [&](int64_t begin, int64_t end) {
    return io::checksum(values + begin, end - begin, first_index + static_cast<uint64_t>(begin));
  });
}

// What cuda::array_checksum() says of such bytes on a GPU: of their 32-bit words, where what lacks of the last one
// counts as zeros.
inline uint64_t byte_checksum(const void* memory, int64_t bytes) {
  return sum_of_parts((bytes + 3) / 4, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      uint32_t word = 0;
      std::memcpy(&word, static_cast<const char*>(memory) + 4 * i,
                  static_cast<std::size_t>(std::min<int64_t>(4, bytes - 4 * i)));
      sum += io::mix64(static_cast<uint64_t>(i), word);
    }
    return sum;
  });
}

}  // namespace uniep::train
