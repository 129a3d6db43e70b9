// NVRTC of the stand-in, for UNIEP_LIBNVRTC: all sources compile to the same few bytes. And NVML: device 1 is one
// without a serial number, and no other has as much power.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>

#include "support/fake_cuda.h"

namespace {

struct Compiler {
  std::atomic<bool> hold = false, fail = false;
  std::atomic<int> begun = 0;
};
Compiler& compiler() {
  static auto* const one = new Compiler;
  return *one;
}

}  // namespace

extern "C" {

// NVRTC's own names.
// NOLINTBEGIN(readability-identifier-naming)
int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
const char* nvrtcGetErrorString(int) {
  return "planned";
}
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(void*, int, const char* const*) {
  ++compiler().begun;
  while (compiler().hold) ::usleep(1000);
  return compiler().fail ? 1 : 0;
}
void fake_nvrtc_hold(int hold) {
  compiler().hold = hold != 0;
}
void fake_nvrtc_fail(int fail) {
  compiler().fail = fail != 0;
}
int fake_nvrtc_begun() {
  return compiler().begun;
}
int nvrtcDestroyProgram(void**) {
  return 0;
}
int nvrtcGetCUBINSize(void*, size_t* size) {
  *size = 4;
  return 0;
}
int nvrtcGetCUBIN(void*, char* cubin) {
  std::copy_n("none", 4, cubin);
  return 0;
}
int nvrtcGetProgramLogSize(void*, size_t* size) {
  *size = 0;
  return 0;
}
int nvrtcGetProgramLog(void*, char*) {
  return 0;
}

int nvmlInit_v2() {
  return 0;
}
int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::snprintf(version, length, "580.1");
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  int number = 0;
  if (std::sscanf(bus, "0000:%02x:", &number) != 1) return 1;
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(number) + 1);
  return 0;
}
int nvmlDeviceGetSerial(void* device, char* serial, unsigned length) {
  if (device == reinterpret_cast<void*>(uintptr_t{2})) return 3;
  std::snprintf(serial, length, "17");
  return 0;
}
int nvmlDeviceGetUUID(void*, char* id, unsigned length) {
  std::snprintf(id, length, "GPU-2");
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* milliwatts) {
  *milliwatts = device == reinterpret_cast<void*>(uintptr_t{2}) ? 699'600 : 500'000;
  return 0;
}
// NOLINTEND(readability-identifier-naming)

}  // extern "C"
