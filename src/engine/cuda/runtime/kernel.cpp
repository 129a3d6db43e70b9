#include "engine/cuda/runtime/kernel.h"

#include <algorithm>
#include <vector>

#include "engine/cuda/runtime/background_compiler.h"
#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep::cuda {

void launch_kernel(CUfunction function, const Launch& launch, void* argument, const char* name) {
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (launch.cluster > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count].value.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
    ++count;
  }
  if (launch.cooperative) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[count].value.cooperative = 1;
    ++count;
  }
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(launch.grid_x);
  config.gridDimY = static_cast<unsigned>(launch.grid_y);
  config.gridDimZ = static_cast<unsigned>(launch.grid_z);
  config.blockDimX = static_cast<unsigned>(launch.threads);
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(launch.shared_bytes);
  config.hStream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {argument};
  check(driver().cuLaunchKernelEx(&config, function, arguments, nullptr), name);
}

namespace {

// By the background compiler, where it has kept them, else from the cache, else now.
std::vector<std::string> compiled(const std::vector<KernelRequest>& requests) {
  std::vector<std::string> cubins(requests.size());
  std::vector<KernelRequest> others;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (BackgroundCompiler::of_process().find(requests[i], cubins[i])) continue;
    others.push_back(requests[i]);
    places.push_back(i);
  }
  std::vector<CompiledKernel> kernels = compile_kernels(others);
  for (std::size_t i = 0; i < others.size(); ++i) cubins[places[i]] = std::move(kernels[i].cubin);
  return cubins;
}

}  // namespace

KernelStore& KernelStore::of_device(int device) {
  static std::mutex mutex;
  static auto* const stores = new std::map<int, KernelStore>;  // contexts may be gone before a static ends
  const std::lock_guard lock(mutex);
  return stores->try_emplace(device, device).first->second;
}

void KernelStore::add(const std::string& key, const std::string& cubin) {
  const std::string action = "loading " + key;
  std::map<std::string, Module> own;  // all the memory that noting it takes
  Module& added = own[key];
  check(driver().cuModuleLoadData(&added.module, cubin.data()), action.c_str());
  const std::lock_guard lock(names_mutex_);
  names_.insert(key);
  modules_.merge(own);
}

bool KernelStore::is_loaded(const KernelRequest& request) const {
  const std::lock_guard lock(names_mutex_);
  return names_.contains(request.description());
}

KernelStore::Module& KernelStore::module(const KernelRequest& request) {
  const std::string key = request.description();
  auto found = modules_.find(key);
  if (found == modules_.end()) {
    add(key, compiled({request})[0]);
    found = modules_.find(key);
  }
  return found->second;
}

CUfunction KernelStore::get(const KernelRequest& request, int shared_bytes) {
  const std::lock_guard lock(mutex_);
  Module& loaded = module(request);
  const auto found = loaded.functions.find(request.function);
  if (found != loaded.functions.end()) return found->second;
  CUfunction function = nullptr;
  check(driver().cuModuleGetFunction(&function, loaded.module, request.function.c_str()), "cuModuleGetFunction");
  constexpr int kAlwaysAllowed = 48 * 1024;
  if (shared_bytes > kAlwaysAllowed) {
    check(driver().cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
          "cuFuncSetAttribute (dynamic shared memory)");
  }
  loaded.functions.emplace(request.function, function);
  return function;
}

int KernelStore::local_bytes(const KernelRequest& request) {
  const std::lock_guard lock(mutex_);
  const auto found = modules_.find(request.description());
  if (found == modules_.end()) return 0;
  const ScopedDevice scope(device_);
  int most = 0;
  for (const auto& [name, function] : found->second.functions) {
    int bytes = 0;
    check(driver().cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function), "cuFuncGetAttribute");
    most = std::max(most, bytes);
  }
  return most;
}

void KernelStore::keep() {
  const std::lock_guard lock(mutex_);
  for (auto& [key, loaded] : modules_) loaded.kept = true;
}

void KernelStore::trim() {
  const std::lock_guard lock(mutex_);
  const ScopedDevice scope(device_);
  check(driver().cuCtxSynchronize(), "waiting for a device");
  ++generation_;
  for (auto loaded = modules_.begin(); loaded != modules_.end();) {
    if (!loaded->second.kept) {
      driver().cuModuleUnload(loaded->second.module);
      const std::lock_guard names(names_mutex_);
      names_.erase(loaded->first);
    }
    loaded = loaded->second.kept ? std::next(loaded) : modules_.erase(loaded);
  }
}

void KernelStore::prepare(std::span<const KernelRequest> requests) {
  const std::lock_guard lock(mutex_);
  std::vector<KernelRequest> missing;
  for (const KernelRequest& request : distinct_modules(requests)) {
    if (!modules_.contains(request.description())) missing.push_back(request);
  }
  if (missing.empty()) return;
  const std::vector<std::string> cubins = compiled(missing);
  for (size_t i = 0; i < missing.size(); ++i) {
    if (!modules_.contains(missing[i].description())) add(missing[i].description(), cubins[i]);
  }
}

}  // namespace uniep::cuda
