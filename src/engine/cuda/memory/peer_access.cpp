#include "engine/cuda/memory/peer_access.h"

#include "engine/cuda/runtime/driver.h"

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
  // One question for nearly all memory: cuMemGetAccess is slow, and an answer for memory that is not mapped an error.
  CUmemoryPool pool = nullptr;
  unsigned allocated = 0;  // by cudaMalloc, which peers with access to the device read
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                                      CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* values[] = {&pool, &allocated};
  check(driver().cuPointerGetAttributes(2, attributes, values, place), "cuPointerGetAttributes");
  if (allocated != 0) return true;
  CUmemLocation location = location_of(device);
  if (pool != nullptr) {
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
