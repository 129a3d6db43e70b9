#pragma once

#include <random>

#include "model/elementwise.h"
#include "tests/cuda/gpu_support.h"

// Host vectors to and from the current device.
namespace uniep::cuda::test {

// Finite values of all sorts of exponents below 2^121, so that sums of 64 of them are finite, too: which NaN inf - inf
// gives is up to the machine.
inline std::vector<BFloat16> random_values(int64_t count, std::mt19937_64& random) {
  std::vector<BFloat16> values(static_cast<size_t>(count));
  for (BFloat16& value : values) {
    const auto bits = static_cast<uint16_t>(random());
    value.bits = (bits & 0x7c00u) == 0x7c00u ? static_cast<uint16_t>(bits & 0xbfffu) : bits;
  }
  return values;
}

template <typename T>
void to_device(T* target, const std::vector<T>& values) {
  if (values.empty()) return;
  check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(target), values.data(), values.size() * sizeof(T),
                                   nullptr),
        "upload");
  check(driver().cuCtxSynchronize(), "upload");
}

template <typename T>
std::vector<T> from_device(const T* source, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (count == 0) return values;
  check(driver().cuMemcpyDtoHAsync(values.data(), reinterpret_cast<CUdeviceptr>(source), values.size() * sizeof(T),
                                   nullptr),
        "download");
  check(driver().cuCtxSynchronize(), "download");
  return values;
}

}  // namespace uniep::cuda::test
