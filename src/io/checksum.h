#pragma once

#include "io/hash64.h"
#include "model/elementwise.h"
#include "uniep/bfloat16.h"

#ifndef __CUDACC_RTC__
#include <string>
#endif

// The checksum of a tensor: the sum modulo 2^64 over its elements of mix64(global flat index, bit pattern). A sum, so
// that ranks and threads hash their own parts in any order and add; the index, so that moved values are seen.
namespace uniep::io {

// `pattern` is the element's bits, zero-extended: 16 of a bf16, 32 of an fp32.
UNIEP_HOST_DEVICE uint64_t mix64(uint64_t index, uint32_t pattern) {
  return avalanche64(avalanche64(index + kGolden64) + pattern);
}

// The part of a tensor's checksum that the elements [first_index, first_index + count) give.
UNIEP_HOST_DEVICE uint64_t checksum(const BFloat16* values, int64_t count, uint64_t first_index) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += mix64(first_index + static_cast<uint64_t>(i), values[i].bits);
  return sum;
}

UNIEP_HOST_DEVICE uint64_t checksum(const float* values, int64_t count, uint64_t first_index) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += mix64(first_index + static_cast<uint64_t>(i), bits_of_float(values[i]));
  return sum;
}

#ifndef __CUDACC_RTC__
// 16 lower-case hex digits.
inline std::string to_hex16(uint64_t value) {
  std::string text(16, '0');
  for (int digit = 15; digit >= 0; --digit, value >>= 4)
    text[static_cast<std::size_t>(digit)] = "0123456789abcdef"[value & 15];
  return text;
}
#endif

}  // namespace uniep::io
