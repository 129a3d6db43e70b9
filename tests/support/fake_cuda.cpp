#include "support/fake_cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

constexpr size_t kGranularity = 2 << 20;

struct Range {
  size_t size = 0;
  CUmemGenericAllocationHandle mapped = 0;  // the handle's file; 0: nothing is mapped
  bool readable = false;
};
struct State {
  std::map<std::string, int> calls;
  std::map<CUdeviceptr, Range> ranges;
  std::map<CUmemGenericAllocationHandle, size_t> handles;  // descriptors of memfds, and their sizes
  std::map<CUdeviceptr, size_t> plain;                     // cuMemAlloc's
  int objects = 0;                                         // streams and events
};
State& state() {
  static State own;
  return own;
}

// What the environment plans for this call.
CUresult planned(const char* function) {
  const std::string name = function;
  const int call = ++state().calls[name];
  const char* const stall = std::getenv("FAKE_CUDA_STALL");
  while (stall != nullptr && stall == name + ":" + std::to_string(call)) ::pause();
  const char* const fail = std::getenv("FAKE_CUDA_FAIL");
  const std::string prefix = name + ":" + std::to_string(call) + ":";
  if (fail != nullptr && std::strncmp(fail, prefix.c_str(), prefix.size()) == 0) {
    return static_cast<CUresult>(std::atoi(fail + prefix.size()));
  }
  return CUDA_SUCCESS;
}
#define PLANNED(name) \
  if (const CUresult result = planned(name); result != CUDA_SUCCESS) return result

CUresult done() {
  const char* const busy = std::getenv("FAKE_CUDA_BUSY");
  return busy != nullptr && *busy == '1' ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

void* memory(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace

extern "C" {

int fake_cuda_live() {
  int count = state().objects + static_cast<int>(state().handles.size() + state().plain.size());
  for (const auto& [address, range] : state().ranges) count += range.mapped != 0 ? 2 : 1;
  return count;
}
void fake_cuda_reset() {
  state().calls.clear();
}

CUresult cuInit(unsigned int) {
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult result, const char** text) {
  *text = result == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "planned";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = 8;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  PLANNED("cuMemAlloc");
  *address = reinterpret_cast<CUdeviceptr>(std::malloc(size));
  state().plain[*address] = size;
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
  std::free(memory(address));
  state().plain.erase(address);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                     unsigned long long) {
  PLANNED("cuMemCreate");
  const int file = ::memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file < 0 || size % kGranularity != 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Not zero, as a device's memory is not.
  const char dirt = 'x';
  if (::pwrite(file, &dirt, 1, 0) != 1) return CUDA_ERROR_INVALID_VALUE;
  *handle = static_cast<CUmemGenericAllocationHandle>(file);
  state().handles[*handle] = size;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (state().handles.erase(handle) == 0) return CUDA_ERROR_INVALID_VALUE;
  ::close(static_cast<int>(handle));
  return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void* file, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long) {
  PLANNED("cuMemExportToShareableHandle");
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const int copy = ::fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
  std::memcpy(file, &copy, sizeof(copy));
  return copy >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* file, CUmemAllocationHandleType) {
  PLANNED("cuMemImportFromShareableHandle");
  const int copy = ::fcntl(static_cast<int>(reinterpret_cast<uintptr_t>(file)), F_DUPFD_CLOEXEC, 0);
  struct stat of {};
  if (copy < 0 || ::fstat(copy, &of) != 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = static_cast<CUmemGenericAllocationHandle>(copy);
  state().handles[*handle] = static_cast<size_t>(of.st_size);
  return CUDA_SUCCESS;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  PLANNED("cuMemRetainAllocationHandle");
  const auto found = state().ranges.find(reinterpret_cast<CUdeviceptr>(address));
  if (found == state().ranges.end() || found->second.mapped == 0) return CUDA_ERROR_INVALID_VALUE;
  *handle =
      static_cast<CUmemGenericAllocationHandle>(::fcntl(static_cast<int>(found->second.mapped), F_DUPFD_CLOEXEC, 0));
  state().handles[*handle] = found->second.size;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  for (const auto& [first, range] : state().ranges) {
    if (address < first || address >= first + range.size || range.mapped == 0) continue;
    *base = first;
    *size = range.size;
    return CUDA_SUCCESS;
  }
  for (const auto& [first, bytes] : state().plain) {
    if (address < first || address >= first + bytes) continue;
    *base = first;
    *size = bytes;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  PLANNED("cuMemAddressReserve");
  void* const reserved = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  state().ranges[*address].size = size;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  const auto found = state().ranges.find(address);
  if (found == state().ranges.end() || found->second.size != size || found->second.mapped != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ::munmap(memory(address), size);
  state().ranges.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  PLANNED("cuMemMap");
  const auto found = state().ranges.find(address);
  const auto of = state().handles.find(handle);
  if (found == state().ranges.end() || of == state().handles.end() || of->second != size || offset != 0 ||
      found->second.size != size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int file = ::fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);  // outlives the handle, as a mapping does
  if (::mmap(memory(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
    ::close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  found->second.mapped = static_cast<CUmemGenericAllocationHandle>(file);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t) {
  PLANNED("cuMemSetAccess");
  if (access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || state().ranges[address].mapped == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return ::mprotect(memory(address), size, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  const auto found = state().ranges.find(address);
  if (found == state().ranges.end() || found->second.mapped == 0) return CUDA_ERROR_INVALID_VALUE;
  void* const reserved =
      ::mmap(memory(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  ::close(static_cast<int>(found->second.mapped));
  found->second.mapped = 0;
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size, CUstream) {
  std::memcpy(memory(to), from, size);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream) {
  std::memcpy(to, memory(from), size);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream) {
  PLANNED("cuMemsetD8Async");
  std::memset(memory(to), value, size);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned int) {
  ++state().objects;
  *stream = reinterpret_cast<CUstream>(uintptr_t{16});
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream) {
  --state().objects;
  return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream) {
  return done();
}
CUresult cuEventCreate(CUevent* event, unsigned int) {
  ++state().objects;
  *event = reinterpret_cast<CUevent>(uintptr_t{16});
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent) {
  --state().objects;
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent, CUstream) {
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent) {
  return done();
}

}  // extern "C"
