#pragma once

#include "engine/cuda/device/arguments/rank_call.h"
#include "program/call_times.h"

// Arguments of the kernel that adds up when a rank's tiles ran (call_times.cu).
namespace uniep::cuda {

constexpr int kCallTimesThreads = 1024;

struct CallTimesArguments {
  const TileRecord* records;  // [agents][capacity]
  const uint32_t* counts;     // [agents]
  uint32_t agents;            // 2 a worker: copy, compute
  uint32_t capacity;
  uint32_t call;
  program::RankTimes* times;  // page-locked memory of the host
};

}  // namespace uniep::cuda
