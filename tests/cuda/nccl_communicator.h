#pragma once

#include "comm/nccl_library.h"

namespace uniep::cuda::test {

// What a caller that has an NCCL communicator does with it, found at run time.
struct NcclCaller {
  struct UniqueId {
    char bytes[128];
  };
  int (*get_unique_id)(UniqueId*);
  int (*init_rank)(Nccl::Communicator*, int ranks, UniqueId, int rank);
  int (*destroy)(Nccl::Communicator);
};

// Throws uniep::Error (kUnsupported) where there is no NCCL.
inline const NcclCaller& nccl_caller() {
  static const NcclCaller table = [] {
    NcclCaller found{};
    nccl_library().bind(found.get_unique_id, "ncclGetUniqueId");
    nccl_library().bind(found.init_rank, "ncclCommInitRank");
    nccl_library().bind(found.destroy, "ncclCommDestroy");
    return found;
  }();
  return table;
}

}  // namespace uniep::cuda::test
