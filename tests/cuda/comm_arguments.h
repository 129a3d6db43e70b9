#pragma once

#include "engine/cuda/device/arguments/signals.h"

// Arguments of comm_kernels.cu, for host and device.
namespace uniep::cuda::test {

constexpr int kMaxTestRanks = 8;

// At the start of every rank's symmetric memory; element p is written by rank p only.
struct ExchangeFlags {
  uint32_t arrive[kMaxTestRanks];  // p's inputs of this epoch are in place
  uint32_t done[kMaxTestRanks];    // p has finished its last access to this rank's memory in this epoch
};

struct ExchangeArguments {
  uint8_t* memory[kMaxTestRanks][kMaxTestRanks];  // [rank][peer]: how `rank` reaches `peer`
  uint32_t* epoch[kMaxTestRanks];
  WaitReport* report[kMaxTestRanks];
  uint32_t* counters[kMaxTestRanks];  // [2]: CTAs of the rank that have written, that have read
  uint32_t* load[kMaxTestRanks];      // traffic beside the exchange
  unsigned long long* errors;
  uint64_t limit_nanoseconds;
  int32_t ranks;
  int32_t first_rank;  // block b works for rank first_rank + b / ctas
  int32_t ctas;        // a rank
  int32_t iterations;
  int32_t words;  // from each rank to each rank
  int32_t load_words;
  int32_t silent_rank;  // does not arrive in the last iteration; -1: none
};

}  // namespace uniep::cuda::test
