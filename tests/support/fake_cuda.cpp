#include "support/fake_cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "engine/cuda/device/arguments/checksum_arguments.h"
#include "engine/cuda/device/arguments/layer_launch.h"
#include "engine/cuda/device/arguments/place_arguments.h"
#include "engine/cuda/device/arguments/signals.h"

namespace {

using uniep::cuda::PlaceArguments;
using uniep::cuda::PlaceFault;
using uniep::cuda::PlaceReport;
using uniep::cuda::WaitReport;

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
  std::map<CUmodule, std::map<std::string, int>> modules;  // their functions, and what these spill
  int failures = 0;
  int objects = 0;  // streams, events and page-locked memory
  bool deals_evenly = false;
  int kernels_behind_events = 0;
  int spilled = 0;                            // by functions from now on
  int layer_ctas = 0, layer_first_tiles = 0;  // of the last launch of a layer
  bool layer_is_cooperative = false;
  std::map<std::string, int> launches;
  int lookups_behind_launch = 0;
  int layers_of_call = 0;  // launches
};
State& state() {
  static State own;
  return own;
}

bool fails_call = false, fails_in_place = false;
// Of the last call: in the device's memory, and where the host has it.
WaitReport* report = nullptr;
WaitReport* told = nullptr;
// Of the last placement, the same.
PlaceReport* place_report = nullptr;
PlaceReport* place_told = nullptr;
std::atomic<bool> captured = false, replayed = false;

CUstreamCaptureStatus capture_status() {
  return captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
}

// What the environment plans for this call.
CUresult planned(const char* function) {
  const std::string name = function;
  const int call = ++state().calls[name];
  const char* const stall = std::getenv("FAKE_CUDA_STALL");
  while (stall != nullptr && stall == name + ":" + std::to_string(call)) ::pause();
  const char* const fail = std::getenv("FAKE_CUDA_FAIL");
  const std::string plan = fail != nullptr ? fail : "";
  static std::string counted;  // a plan with a +, and the call behind which it began
  static int before = 0;
  if (plan.empty()) counted.clear();
  if (!plan.starts_with(name + ":")) return CUDA_SUCCESS;
  const bool from_now = plan[name.size() + 1] == '+';
  if (from_now && plan != counted) counted = plan, before = call - 1;
  char* end = nullptr;
  const long first = std::strtol(plan.c_str() + name.size() + 1, &end, 10);
  const long last = *end == '-' ? std::strtol(end + 1, nullptr, 10) : first;
  const long number = call - (from_now ? before : 0);
  if (number < first || number > last) return CUDA_SUCCESS;
  ++state().failures;
  return static_cast<CUresult>(std::atoi(plan.c_str() + plan.rfind(':') + 1));
}
#define PLANNED(name) \
  if (const CUresult result = planned(name); result != CUDA_SUCCESS) return result
// Of a call that takes something that may run out.
#define REQUEST(name) \
  PLANNED(name);      \
  PLANNED("request")

// How long the environment has a launch take.
void take_time() {
  const char* const microseconds = std::getenv("FAKE_CUDA_LAUNCH_US");
  if (microseconds != nullptr) ::usleep(static_cast<useconds_t>(std::atoi(microseconds)));
}

// Of the calling thread. What works in a context fails without one, also where the driver would ask the stream or the
// memory for theirs, but for what is ended or waited for.
thread_local CUcontext current = nullptr;
#define IN_CONTEXT() \
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT

CUresult done() {
  const char* const busy = std::getenv("FAKE_CUDA_BUSY");
  return busy != nullptr && *busy == '1' ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

void* memory(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

// What counting gives where all experts have the same share of each rank's slots.
void deal_evenly(const PlaceArguments& args) {
  for (int own = 0; own < args.ranks; ++own) {
    const uniep::cuda::PlaceRank& rank = args.rank[own];
    if (rank.tables.counts == nullptr) return;
    for (int peer = 0; peer < args.ranks; ++peer) {
      rank.tables.tokens_of_rank[peer] = rank.tokens;
      std::fill_n(rank.tables.counts + peer * args.terms.experts, args.terms.experts,
                  rank.tokens * args.terms.topk / args.terms.experts);
    }
  }
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
  state().launches.clear();
  state().lookups_behind_launch = 0;
}
int fake_cuda_failures() {
  return state().failures;
}
int fake_cuda_layer_ctas() {
  return state().layer_ctas;
}
int fake_cuda_layer_first_tiles() {
  return state().layer_first_tiles;
}
int fake_cuda_layer_is_cooperative() {
  return state().layer_is_cooperative ? 1 : 0;
}
int fake_cuda_kernels_behind_events() {
  return state().kernels_behind_events;
}
int fake_cuda_modules() {
  return static_cast<int>(state().modules.size());
}
void fake_cuda_deal_evenly(int deal) {
  state().deals_evenly = deal != 0;
}
void fake_cuda_spill(int bytes) {
  state().spilled = bytes;
}
void fake_cuda_fail_call() {
  fails_call = true;
}
void fake_cuda_fail_last_call() {
  report->failed = told->failed = 1;
}
void fake_cuda_fail_last_call_in_place() {
  fails_in_place = true;
}
void fake_cuda_fail_last_place(int fault) {
  place_report->fault = place_told->fault = static_cast<PlaceFault>(fault);
  place_report->rank = 1;
}
int fake_cuda_launches(const char* name) {
  return state().launches[name];
}
int fake_cuda_lookups_behind_launch() {
  return state().lookups_behind_launch;
}
void fake_cuda_capture(int capture) {
  captured = capture != 0;
}
void fake_cuda_replay(int replay) {
  replayed = replay != 0;
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
CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  IN_CONTEXT();
  REQUEST("cuMemAlloc");
  *address = reinterpret_cast<CUdeviceptr>(std::calloc(size, 1));
  if (*address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  state().plain[*address] = size;
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
  IN_CONTEXT();
  if (state().plain.erase(address) == 0) return CUDA_ERROR_INVALID_VALUE;
  std::free(memory(address));
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                     unsigned long long) {
  REQUEST("cuMemCreate");
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
  IN_CONTEXT();
  std::memcpy(memory(to), from, size);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream) {
  IN_CONTEXT();
  if (size == sizeof(WaitReport)) {
    report = static_cast<WaitReport*>(memory(from));
    told = static_cast<WaitReport*>(to);
    const bool one_launch = std::exchange(state().layers_of_call, 0) == 1;
    const bool fails = one_launch && planned("one launch") != CUDA_SUCCESS;
    if (std::exchange(fails_call, false) || fails) report->failed = 1;
  }
  if (size == sizeof(PlaceReport)) {
    place_report = static_cast<PlaceReport*>(memory(from));
    place_told = static_cast<PlaceReport*>(to);
  }
  std::memcpy(to, memory(from), size);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream) {
  IN_CONTEXT();
  PLANNED("cuMemsetD8Async");
  std::memset(memory(to), value, size);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned int) {
  IN_CONTEXT();
  REQUEST("cuStreamCreate");
  ++state().objects;
  *stream = reinterpret_cast<CUstream>(uintptr_t{16});
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream) {
  IN_CONTEXT();
  --state().objects;
  return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream) {
  IN_CONTEXT();
  return done();
}
CUresult cuEventCreate(CUevent* event, unsigned int) {
  IN_CONTEXT();
  REQUEST("cuEventCreate");
  ++state().objects;
  *event = reinterpret_cast<CUevent>(uintptr_t{16});
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent) {
  --state().objects;
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent, CUstream) {
  IN_CONTEXT();
  state().kernels_behind_events = 0;
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent) {
  return done();
}
CUresult cuEventSynchronize(CUevent) {
  return CUDA_SUCCESS;
}

// ---- What runs layers: kernels do nothing

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::strncpy(name, "stand-in", static_cast<size_t>(length));
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const bool major = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
  const bool minor = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
  *value = major ? 9 : minor ? 0 : 8;
  return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  *can = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned int) {
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  IN_CONTEXT();
  PLANNED("cuCtxSynchronize");
  while (replayed) ::usleep(1000);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  IN_CONTEXT();
  REQUEST("cuModuleLoadData");
  *module = reinterpret_cast<CUmodule>(std::malloc(1));
  state().modules[*module];
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) {
  IN_CONTEXT();
  if (state().modules.erase(module) == 0) return CUDA_ERROR_INVALID_VALUE;
  std::free(module);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  IN_CONTEXT();
  *function = reinterpret_cast<CUfunction>(&state().modules.at(module)[name]);
  *reinterpret_cast<int*>(*function) = state().spilled;
  if (state().launches["uniep_layer"] > 0) ++state().lookups_behind_launch;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  IN_CONTEXT();
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction function) {
  IN_CONTEXT();
  *value = *reinterpret_cast<int*>(function);
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  IN_CONTEXT();
  *clusters = 1000;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  IN_CONTEXT();
  PLANNED("cuLaunchKernelEx");
  for (auto& [module, functions] : state().modules) {
    for (auto& [name, spilled] : functions) {
      if (reinterpret_cast<CUfunction>(&spilled) != function) continue;
      ++state().launches[name];
      ++state().kernels_behind_events;
      take_time();
      if (name == "uniep_checksum" && planned("checksum") != CUDA_SUCCESS) {
        ++*static_cast<uniep::cuda::ChecksumArguments*>(arguments[0])->sum;
      }
      if (name == "uniep_layer") {
        ++state().layers_of_call;
        state().layer_ctas = static_cast<int>(config->gridDimX);
        state().layer_first_tiles = static_cast<uniep::cuda::LayerLaunch*>(arguments[0])->calls->program.first_tiles;
        state().layer_is_cooperative =
            std::any_of(config->attrs, config->attrs + config->numAttrs,
                        [](const CUlaunchAttribute& one) { return one.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE; });
      }
      if (name == "uniep_place" && std::exchange(fails_in_place, false)) report->failed = told->failed = 1;
      if (state().deals_evenly && name == "uniep_place") deal_evenly(*static_cast<PlaceArguments*>(arguments[0]));
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_HANDLE;  // of a module that was unloaded
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  IN_CONTEXT();
  *milliseconds = 0.1F;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** values, CUdeviceptr) {
  for (unsigned int i = 0; i < count; ++i) {
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *static_cast<int*>(values[i]) = 0;
    if (attributes[i] == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE) *static_cast<void**>(values[i]) = nullptr;
    if (attributes[i] == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS) *static_cast<unsigned int*>(values[i]) = 3;
  }
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** address, size_t size, unsigned int) {
  IN_CONTEXT();
  REQUEST("cuMemHostAlloc");
  *address = std::calloc(size, 1);
  ++state().objects;
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* address) {
  if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::free(address);
  --state().objects;
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream) {
  IN_CONTEXT();
  std::memcpy(memory(to), memory(from), size);
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) {
  IN_CONTEXT();
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned int) {
  IN_CONTEXT();
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo(CUstream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph*, const CUgraphNode**,
                                const CUgraphEdgeData**, size_t*) {
  IN_CONTEXT();
  *status = capture_status();
  *id = captured ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  IN_CONTEXT();
  *status = capture_status();
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) {
  return CUDA_SUCCESS;
}

}  // extern "C"
