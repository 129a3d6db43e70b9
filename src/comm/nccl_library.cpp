#include "comm/nccl_library.h"

#include <string>

#include "engine/cuda/dynamic_library.h"
#include "uniep/error.h"

namespace uniep {
namespace {

constexpr int kOldestVersion = 22800;

Nccl load_nccl() {
  static const cuda::DynamicLibrary library("NCCL", "UNIEP_LIBNCCL", {"libnccl.so.2", "libnccl.so"});
  Nccl table{};
  library.bind(table.get_version, "ncclGetVersion");
  library.bind(table.error_string, "ncclGetErrorString");
  table.get_version(&table.version);
  if (table.version < kOldestVersion) {
    throw Error(Status::kUnsupported,
                "NCCL " + std::to_string(table.version) + " has no symmetric windows: version 2.28 or later is needed");
  }
  library.bind(table.get_unique_id, "ncclGetUniqueId");
  library.bind(table.init_rank, "ncclCommInitRank");
  library.bind(table.destroy, "ncclCommDestroy");
  library.bind(table.abort, "ncclCommAbort");
  library.bind(table.memory_allocate, "ncclMemAlloc");
  library.bind(table.memory_free, "ncclMemFree");
  library.bind(table.register_window, "ncclCommWindowRegister");
  library.bind(table.deregister_window, "ncclCommWindowDeregister");
  library.bind(table.all_reduce, "ncclAllReduce");
  library.bind(table.rank_of, "ncclCommUserRank");
  library.bind(table.count_of, "ncclCommCount");
  table.lsa_device_pointer =
      reinterpret_cast<decltype(table.lsa_device_pointer)>(library.find_or_null("ncclGetLsaDevicePointer"));
  return table;
}

}  // namespace

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
