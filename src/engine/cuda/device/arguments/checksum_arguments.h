#pragma once

#include "model/portability.h"

namespace uniep::cuda {

inline constexpr int kChecksumThreads = 256;

struct ChecksumArguments {
  const void* memory;   // on a 4-byte boundary
  int64_t bytes;        // what lacks of the last word counts as zeros
  uint64_t first_word;  // index of the first one
  unsigned long long* sum;
};

}  // namespace uniep::cuda
