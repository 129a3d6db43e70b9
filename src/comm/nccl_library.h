#pragma once

#include <cstddef>

namespace uniep {

// The few functions of NCCL that are used, declared here so that its header is not needed to build, and found at run
// time. nccl() throws uniep::Error (kUnsupported) where there is no NCCL or it is older than 2.28.
struct Nccl {
  struct UniqueId {
    char bytes[128];
  };
  using Communicator = void*;
  using Window = void*;
  static constexpr int kInt32 = 2;
  static constexpr int kSum = 0;
  static constexpr int kSymmetricWindow = 1;

  int version;
  int (*get_version)(int*);
  const char* (*error_string)(int);
  int (*get_unique_id)(UniqueId*);
  int (*init_rank)(Communicator*, int ranks, UniqueId, int rank);
  int (*destroy)(Communicator);
  int (*abort)(Communicator);  // does not wait for other ranks, as the others may
  int (*memory_allocate)(void**, size_t);
  int (*memory_free)(void*);
  int (*register_window)(Communicator, void*, size_t, Window*, int flags);
  int (*deregister_window)(Communicator, Window);
  int (*all_reduce)(const void*, void*, size_t, int type, int operation, Communicator, void* stream);
  int (*rank_of)(Communicator, int*);
  int (*count_of)(Communicator, int*);
  // From 2.29 on; null in 2.28, whose windows are read instead.
  int (*lsa_device_pointer)(Window, size_t offset, int peer, void**);
};

const Nccl& nccl();
void check_nccl(int result, const char* action);

}  // namespace uniep
