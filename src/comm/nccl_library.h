#pragma once

#include <cstddef>

#include "engine/cuda/runtime/dynamic_library.h"

namespace uniep {

// The few functions of NCCL that are used, declared here so that its header is not needed to build, and found at run
// time. nccl() throws uniep::Error (kUnsupported) where there is no NCCL.
struct Nccl {
  using Communicator = void*;
  static constexpr int kInt32 = 2;
  static constexpr int kSum = 0;
  static constexpr int kInProgress = 7;  // of a communicator that does not block

  const char* (*error_string)(int);
  int (*all_reduce)(const void*, void*, size_t, int type, int operation, Communicator, void* stream);
  int (*async_error)(Communicator, int* result);
  int (*rank_of)(Communicator, int*);
  int (*count_of)(Communicator, int*);
};

const cuda::DynamicLibrary& nccl_library();
const Nccl& nccl();
void check_nccl(int result, const char* action);

}  // namespace uniep
