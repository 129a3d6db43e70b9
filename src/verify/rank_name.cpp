#include "verify/rank_name.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

namespace uniep::verify {
namespace {

template <typename Function>
Function* found(void* library, const char* symbol) {
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, symbol));
}

constexpr int kTextBytes = 96;  // of the longest answer, NVML_DEVICE_UUID_V2_BUFFER_SIZE

// By NVML, which knows a device by its place on the bus; empty where anything is missing.
std::string serial_number(int device) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  auto* const bus_id = found<int(char*, int, int)>(driver, "cuDeviceGetPCIBusId");
  auto* const handle_of = found<int(int*, int)>(driver, "cuDeviceGet");
  auto* const begin = found<int()>(nvml, "nvmlInit_v2");
  auto* const find_device = found<int(const char*, void**)>(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
  auto* const serial = found<int(void*, char*, unsigned)>(nvml, "nvmlDeviceGetSerial");
  auto* const id = found<int(void*, char*, unsigned)>(nvml, "nvmlDeviceGetUUID");
  if (bus_id == nullptr || handle_of == nullptr || begin == nullptr || find_device == nullptr) return "";
  char bus[kTextBytes] = "", text[kTextBytes] = "";
  void* found_device = nullptr;
  int handle = 0;
  if (handle_of(&handle, device) != 0 || bus_id(bus, kTextBytes, handle) != 0 || begin() != 0 ||
      find_device(bus, &found_device) != 0) {
    return "";
  }
  if (serial != nullptr && serial(found_device, text, kTextBytes) == 0) return fmt::format("serial number {}", text);
  if (id != nullptr && id(found_device, text, kTextBytes) == 0) return text;
  return fmt::format("PCI {}", bus);
}

}  // namespace

std::string rank_name(const Group& group, int rank) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  if (group.engine() != EngineKind::kCuda) return fmt::format("cpu engine, host {}", host);
  const int device = group.device(rank);
  const std::string serial = serial_number(device);
  return fmt::format("GPU {}{}{}, host {}", device, serial.empty() ? "" : ", ", serial, host);
}

}  // namespace uniep::verify
