#pragma once

#include "model/portability.h"

// The integer hash behind synthetic data and checksums; docs/synthetic_data.md is its specification. All arithmetic is
// modulo 2^64.
namespace uniep::io {

constexpr uint64_t kGolden64 = 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio, odd

// The finaliser of splitmix64: a bijection in which every input bit reaches every output bit.
UNIEP_HOST_DEVICE uint64_t avalanche64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

}  // namespace uniep::io
