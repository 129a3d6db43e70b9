#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "io/checksum.h"
#include "reference/parallel.h"

namespace uniep::cli {

// io::checksum() by all cores.
template <typename T>
uint64_t parallel_checksum(const T* values, int64_t count, uint64_t first_index = 0) {
  constexpr int64_t kPart = int64_t{1} << 20;
  constexpr double kWork = 10;  // flops that an element's hash is like
  std::atomic<uint64_t> sum{0};
  reference::parallel_for((count + kPart - 1) / kPart, kWork * static_cast<double>(count), [&](int64_t part) {
    const int64_t begin = part * kPart, end = std::min(count, begin + kPart);
    sum += io::checksum(values + begin, end - begin, first_index + static_cast<uint64_t>(begin));
  });
  return sum;
}

}  // namespace uniep::cli
