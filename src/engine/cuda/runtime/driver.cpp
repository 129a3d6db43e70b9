#include "engine/cuda/runtime/driver.h"

#include <map>
#include <mutex>

#include "engine/cuda/runtime/dynamic_library.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

#define UNIEP_TEXT_OF(name) #name
#define UNIEP_SYMBOL(name) UNIEP_TEXT_OF(name)  // after cuda.h's macros: the versioned symbol

Driver load_driver() {
  static const DynamicLibrary library("the CUDA driver", "UNIEP_LIBCUDA", {"libcuda.so.1", "libcuda.so"});
  Driver table{};
#define UNIEP_BIND(name) library.bind(table.name, UNIEP_SYMBOL(name));
  UNIEP_DRIVER_FUNCTIONS(UNIEP_BIND)
#undef UNIEP_BIND
  const CUresult result = table.cuInit(0);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::kUnsupported, "the CUDA driver found no usable GPU (cuInit returned " +
                                          std::to_string(static_cast<int>(result)) + ")");
  }
  return table;
}

CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::map<int, CUcontext> contexts;
  const std::lock_guard lock(mutex);
  const auto found = contexts.find(device);
  if (found != contexts.end()) return found->second;
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
  CUcontext context = nullptr;
  check(driver().cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  contexts.emplace(device, context);
  return context;
}

}  // namespace

const Driver& driver() {
  static const Driver table = load_driver();
  return table;
}

// NOLINTNEXTLINE(bugprone-exception-escape): it was loaded by whoever got what is freed
const Driver& loaded_driver() noexcept {
  return driver();
}

void check(CUresult result, const char* action) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().cuGetErrorString(result, &text);
  const Status status = result == CUDA_ERROR_OUT_OF_MEMORY ? Status::kOutOfMemory : Status::kDevice;
  throw Error(status, std::string(action) + " failed: " + (text != nullptr ? text : "unknown CUDA error") + " (" +
                          std::to_string(static_cast<int>(result)) + ")");
}

ScopedDevice::ScopedDevice(int device) {
  check(driver().cuCtxGetCurrent(&previous_), "cuCtxGetCurrent");
  CUcontext own = primary_context(device);
  entered_ = own != previous_;
  if (entered_) check(driver().cuCtxSetCurrent(own), "cuCtxSetCurrent");
}

ScopedDevice::ScopedDevice(int device, const std::nothrow_t&) noexcept {
  try {
    if (driver().cuCtxGetCurrent(&previous_) != CUDA_SUCCESS) return;
    CUcontext own = primary_context(device);
    entered_ = own != previous_ && driver().cuCtxSetCurrent(own) == CUDA_SUCCESS;
  } catch (const std::exception&) {  // of primary_context(): nothing was entered
  }
}

ScopedDevice::~ScopedDevice() {
  if (entered_) loaded_driver().cuCtxSetCurrent(previous_);
}

int device_count() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

int device_attribute(int device, CUdevice_attribute attribute) {
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, attribute, handle), "cuDeviceGetAttribute");
  return value;
}

std::string device_name(int device) {
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
  char name[128] = {};
  check(driver().cuDeviceGetName(name, sizeof(name), handle), "cuDeviceGetName");
  return name;
}

void require_hopper(int device) {
  const int major = device_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  const int minor = device_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  if (major != 9 || minor != 0) {
    throw Error(Status::kUnsupported, "the cuda engine needs compute capability 9.0 (Hopper); device " +
                                          std::to_string(device) + " (" + device_name(device) + ") has " +
                                          std::to_string(major) + "." + std::to_string(minor));
  }
}

}  // namespace uniep::cuda
