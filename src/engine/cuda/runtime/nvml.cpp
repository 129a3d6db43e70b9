#include "engine/cuda/runtime/nvml.h"

#include <dlfcn.h>

#include <cstdlib>

namespace uniep::cuda {
namespace {

template <typename Function>
Function* found(void* library, const char* symbol) {
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, symbol));
}

void* open_library(const char* variable, const char* name) {
  const char* const given = std::getenv(variable);
  return dlopen(given != nullptr ? given : name, RTLD_NOW);
}

constexpr int kTextBytes = 96;  // of the longest answer, NVML_DEVICE_UUID_V2_BUFFER_SIZE

}  // namespace

// A device is known to it by its place on the bus. By declarations of its own, for builds without CUDA's headers.
GpuState gpu_state(int device) {
  void* const driver = open_library("UNIEP_LIBCUDA", "libcuda.so.1");
  void* const nvml = open_library("UNIEP_LIBNVML", "libnvidia-ml.so.1");
  auto* const bus_id = found<int(char*, int, int)>(driver, "cuDeviceGetPCIBusId");
  auto* const handle_of = found<int(int*, int)>(driver, "cuDeviceGet");
  auto* const begin = found<int()>(nvml, "nvmlInit_v2");
  auto* const find_device = found<int(const char*, void**)>(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
  auto* const serial = found<int(void*, char*, unsigned)>(nvml, "nvmlDeviceGetSerial");
  auto* const id = found<int(void*, char*, unsigned)>(nvml, "nvmlDeviceGetUUID");
  auto* const version = found<int(char*, unsigned)>(nvml, "nvmlSystemGetDriverVersion");
  auto* const power_limit = found<int(void*, unsigned*)>(nvml, "nvmlDeviceGetEnforcedPowerLimit");
  GpuState state;
  if (bus_id == nullptr || handle_of == nullptr || begin == nullptr || find_device == nullptr) return state;
  char bus[kTextBytes] = "", text[kTextBytes] = "";
  void* found_device = nullptr;
  int handle = 0;
  if (handle_of(&handle, device) != 0 || bus_id(bus, kTextBytes, handle) != 0 || begin() != 0 ||
      find_device(bus, &found_device) != 0) {
    return state;
  }
  if (version != nullptr && version(text, kTextBytes) == 0) state.driver = text;
  constexpr unsigned kMilliwatts = 1000;
  unsigned limit = 0;
  if (power_limit != nullptr && power_limit(found_device, &limit) == 0) {
    state.power_limit_watts = static_cast<int>((limit + kMilliwatts / 2) / kMilliwatts);
  }
  state.serial = std::string("PCI ") + bus;
  if (id != nullptr && id(found_device, text, kTextBytes) == 0) state.serial = text;
  if (serial != nullptr && serial(found_device, text, kTextBytes) == 0)
    state.serial = std::string("serial number ") + text;
  return state;
}

}  // namespace uniep::cuda
