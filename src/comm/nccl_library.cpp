#include "comm/nccl_library.h"

#include <string>

#include "uniep/error.h"

namespace uniep {
namespace {

Nccl load_nccl() {
  Nccl table{};
  nccl_library().bind(table.error_string, "ncclGetErrorString");
  nccl_library().bind(table.all_reduce, "ncclAllReduce");
  nccl_library().bind(table.async_error, "ncclCommGetAsyncError");
  nccl_library().bind(table.rank_of, "ncclCommUserRank");
  nccl_library().bind(table.count_of, "ncclCommCount");
  return table;
}

}  // namespace

const cuda::DynamicLibrary& nccl_library() {
  static const cuda::DynamicLibrary library("NCCL", "UNIEP_LIBNCCL", {"libnccl.so.2", "libnccl.so"}, "nccl");
  return library;
}

const Nccl& nccl() {
  static const Nccl table = load_nccl();
  return table;
}

void check_nccl(int result, const char* action) {
  if (result == 0) return;
  throw Error(Status::kDevice, std::string(action) + " failed: " + nccl().error_string(result) + " (NCCL error " +
                                   std::to_string(result) + ")");
}

}  // namespace uniep
