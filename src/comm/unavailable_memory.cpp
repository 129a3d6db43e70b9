// Symmetric memory of a library that was built without cuda.h.
#include "comm/symmetric_memory.h"
#include "uniep/error.h"

namespace uniep {
namespace {

[[noreturn]] void refuse() {
  throw Error(Status::kUnsupported, "this library was built without the CUDA headers (cuda.h): no symmetric memory");
}

}  // namespace

std::unique_ptr<SymmetricMemory> make_local_symmetric_memory(const std::vector<int>&, int64_t) {
  refuse();
}
NcclBootstrap nccl_bootstrap_from_environment() {
  refuse();
}
std::string make_nccl_unique_id() {
  refuse();
}
std::unique_ptr<SymmetricMemory> make_nccl_symmetric_memory(const NcclBootstrap&, int64_t) {
  refuse();
}

}  // namespace uniep
