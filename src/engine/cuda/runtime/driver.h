#pragma once

#include <cuda.h>

#include <new>
#include <string>

namespace uniep::cuda {

#define UNIEP_DRIVER_FUNCTIONS(X)      \
  X(cuInit)                            \
  X(cuDriverGetVersion)                \
  X(cuGetErrorString)                  \
  X(cuDeviceGet)                       \
  X(cuDeviceGetCount)                  \
  X(cuDeviceGetName)                   \
  X(cuDeviceGetAttribute)              \
  X(cuDeviceCanAccessPeer)             \
  X(cuDevicePrimaryCtxRetain)          \
  X(cuCtxSetCurrent)                   \
  X(cuCtxGetCurrent)                   \
  X(cuCtxEnablePeerAccess)             \
  X(cuCtxSynchronize)                  \
  X(cuModuleLoadData)                  \
  X(cuModuleUnload)                    \
  X(cuModuleGetFunction)               \
  X(cuFuncSetAttribute)                \
  X(cuFuncGetAttribute)                \
  X(cuLaunchKernelEx)                  \
  X(cuOccupancyMaxActiveClusters)      \
  X(cuTensorMapEncodeTiled)            \
  X(cuMemAlloc)                        \
  X(cuMemFree)                         \
  X(cuMemGetInfo)                      \
  X(cuMemHostAlloc)                    \
  X(cuMemFreeHost)                     \
  X(cuMemGetAddressRange)              \
  X(cuMemGetAllocationGranularity)     \
  X(cuMemCreate)                       \
  X(cuMemRelease)                      \
  X(cuMemRetainAllocationHandle)       \
  X(cuMemExportToShareableHandle)      \
  X(cuMemImportFromShareableHandle)    \
  X(cuMemAddressReserve)               \
  X(cuMemAddressFree)                  \
  X(cuMemMap)                          \
  X(cuMemUnmap)                        \
  X(cuMemSetAccess)                    \
  X(cuPointerGetAttributes)            \
  X(cuStreamWaitValue32)               \
  X(cuMemcpyAsync)                     \
  X(cuMemcpyHtoDAsync)                 \
  X(cuMemcpyDtoHAsync)                 \
  X(cuMemcpyDtoDAsync)                 \
  X(cuMemsetD8Async)                   \
  X(cuMemGetAccess)                    \
  X(cuMemPoolGetAccess)                \
  X(cuStreamCreate)                    \
  X(cuStreamDestroy)                   \
  X(cuStreamSynchronize)               \
  X(cuStreamQuery)                     \
  X(cuStreamWaitEvent)                 \
  X(cuStreamGetCaptureInfo)            \
  X(cuStreamIsCapturing)               \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuEventCreate)                     \
  X(cuEventDestroy)                    \
  X(cuEventRecord)                     \
  X(cuEventQuery)                      \
  X(cuEventSynchronize)                \
  X(cuEventElapsedTime)

// The CUDA driver's functions, found at run time. driver() throws uniep::Error (kUnsupported) where there is none.
struct Driver {
#define UNIEP_DECLARE(name) decltype(&::name) name;
  UNIEP_DRIVER_FUNCTIONS(UNIEP_DECLARE)
#undef UNIEP_DECLARE
};

const Driver& driver();

// The same for destructors: who has something to free has called driver(), which fails no more.
const Driver& loaded_driver() noexcept;

// Throws uniep::Error (kDevice, or kOutOfMemory) that names `action` unless `result` is success.
void check(CUresult result, const char* action);

inline CUdeviceptr device_pointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

// Makes a device's primary context current for a scope; the caller's context comes back after it.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);
  // For destructors: where the driver refuses (its device failed, the process ends) the caller's context stays, and
  // what is to be given back goes with the device's.
  ScopedDevice(int device, const std::nothrow_t&) noexcept;
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  CUcontext previous_ = nullptr;
  bool entered_ = false;  // or it was current before
};

int device_count();
int device_attribute(int device, CUdevice_attribute attribute);
std::string device_name(int device);

// Throws unless the device is of compute capability 9.0.
void require_hopper(int device);

}  // namespace uniep::cuda
