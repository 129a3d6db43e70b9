// Symmetric memory of a library that was built without cuda.h.
#include "comm/symmetric_memory.h"
#include "uniep/error.h"

namespace uniep {
namespace {

[[noreturn]] void refuse() {
  throw Error(Status::kUnsupported, "this library was built without the CUDA headers (cuda.h): no symmetric memory");
}

}  // namespace

std::unique_ptr<SymmetricMemory> make_local_symmetric_memory(const std::vector<int>&, int64_t, double) {
  refuse();
}
std::unique_ptr<SymmetricMemory> make_process_memory(std::shared_ptr<RankMesh>, int64_t, int, bool) {
  refuse();
}
std::unique_ptr<SymmetricMemory> share_memory(std::shared_ptr<RankMesh>, void*, int64_t, int) {
  refuse();
}

}  // namespace uniep
