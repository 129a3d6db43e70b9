#pragma once

#include <cuda.h>

#include <cstdint>

#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/dynamic_library.h"

// Memory that a caller may have its inputs in, beside cuMemAlloc's.
namespace uniep::cuda::test {

// cuMemCreate's, mapped for its own device alone, as PyTorch's expandable segments are. With a handle that processes
// can share, if that is wanted.
class MappedMemory {
 public:
  MappedMemory(int device, int64_t bytes, bool shareable) : device_(device) {
    const ScopedDevice scope(device);
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    if (shareable) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    std::size_t granularity = 0;
    check(driver().cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    size_ = (static_cast<std::size_t>(bytes) + granularity - 1) / granularity * granularity;
    CUmemGenericAllocationHandle handle = 0;
    check(driver().cuMemCreate(&handle, size_, &properties, 0), "cuMemCreate");
    check(driver().cuMemAddressReserve(&address_, size_, 0, 0, 0), "cuMemAddressReserve");
    check(driver().cuMemMap(address_, size_, 0, handle, 0), "cuMemMap");
    check(driver().cuMemRelease(handle), "cuMemRelease");  // the mapping keeps it
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(driver().cuMemSetAccess(address_, size_, &access, 1), "cuMemSetAccess");
  }
  ~MappedMemory() {
    const ScopedDevice scope(device_);
    driver().cuCtxSynchronize();
    driver().cuMemUnmap(address_, size_);
    driver().cuMemAddressFree(address_, size_);
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(address_); }

 private:
  int device_;
  std::size_t size_ = 0;
  CUdeviceptr address_ = 0;
};

// Of a device's default pool, which no other device reaches unless somebody says so.
class PoolMemory {
 public:
  PoolMemory(int device, int64_t bytes, CUstream stream) : device_(device), stream_(stream) {
    const ScopedDevice scope(device);
    CUdevice handle = 0;
    check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
    CUmemoryPool pool = nullptr;
    check(functions().default_pool(&pool, handle), "cuDeviceGetDefaultMemPool");
    check(functions().allocate(&address_, static_cast<std::size_t>(bytes), pool, stream), "cuMemAllocFromPoolAsync");
  }
  ~PoolMemory() {
    const ScopedDevice scope(device_);
    functions().release(address_, stream_);
  }
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(address_); }

 private:
  struct Functions {
    decltype(&::cuDeviceGetDefaultMemPool) default_pool;
    decltype(&::cuMemAllocFromPoolAsync) allocate;
    decltype(&::cuMemFreeAsync) release;

    Functions() {
      static const DynamicLibrary library("the CUDA driver", "UNIEP_LIBCUDA", {"libcuda.so.1"});
      library.bind(default_pool, "cuDeviceGetDefaultMemPool");
      library.bind(allocate, "cuMemAllocFromPoolAsync");
      library.bind(release, "cuMemFreeAsync");
    }
  };
  static const Functions& functions() {
    static const Functions functions;
    return functions;
  }

  int device_;
  CUstream stream_;
  CUdeviceptr address_ = 0;
};

}  // namespace uniep::cuda::test
