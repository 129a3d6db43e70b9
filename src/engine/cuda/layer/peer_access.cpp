#include "engine/cuda/layer/peer_access.h"

#include "engine/cuda/driver.h"

namespace uniep::cuda {
namespace {

CUmemLocation location_of(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

}  // namespace

bool can_read(int device, const void* address) {
  if (address == nullptr) return true;
  const auto place = reinterpret_cast<CUdeviceptr>(address);
  CUmemLocation location = location_of(device);
  CUmemoryPool pool = nullptr;
  if (driver().cuPointerGetAttribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, place) == CUDA_SUCCESS &&
      pool != nullptr) {
    CUmemAccess_flags rights = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    check(driver().cuMemPoolGetAccess(&rights, pool, &location), "cuMemPoolGetAccess");
    return rights != CU_MEM_ACCESS_FLAGS_PROT_NONE;
  }
  unsigned long long rights = 0;
  // Only mapped memory has an answer.
  if (driver().cuMemGetAccess(&rights, &location, place) != CUDA_SUCCESS) return true;
  return rights != CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

}  // namespace uniep::cuda
