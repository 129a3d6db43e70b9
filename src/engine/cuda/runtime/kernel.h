#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>

#include "engine/cuda/runtime/run_time_compiler.h"

namespace uniep::cuda {

struct Launch {
  int grid_x = 1;
  int grid_y = 1;
  int grid_z = 1;
  int threads = 0;
  int cluster = 1;
  int shared_bytes = 0;
  bool cooperative = false;
  CUstream stream = nullptr;
};

// A kernel's argument block, passed as it is.
void launch_kernel(CUfunction function, const Launch& launch, void* argument, const char* name);

// Kernels of one device, compiled on demand and kept.
class KernelStore {
 public:
  // The one that all groups of this process share; it lasts as long as the process.
  static KernelStore& of_device(int device);

  explicit KernelStore(int device) : device_(device) {}

  // The function, with its dynamic shared memory allowed. The device's context must be current.
  CUfunction get(const KernelRequest& request, int shared_bytes);

  // Compiles and loads several at once.
  void prepare(std::span<const KernelRequest> requests);

  // What is loaded now stays loaded: graphs may launch it.
  void keep();

  // Local memory of a thread, in bytes, in the functions of this module that get() gave; 0 without any. UniEP's kernels
  // keep no arrays and pass no arguments there, so it is what the compiler spilled for want of registers.
  int local_bytes(const KernelRequest& request);

  // Without waiting for what is compiled or loaded just now.
  bool is_loaded(const KernelRequest& request) const;

  // Unloads all but what keep() has kept. Waits for the device; nobody may launch meanwhile, and functions that get()
  // gave before are void.
  void trim();
  // How often trim() has unloaded.
  uint64_t generation() const { return generation_; }

  int device() const { return device_; }

 private:
  struct Module {
    CUmodule module;
    bool kept = false;
    std::map<std::string, CUfunction> functions;
  };

  Module& module(const KernelRequest& request);
  void add(const std::string& key, const std::string& cubin);

  int device_;
  std::mutex mutex_;
  std::map<std::string, Module> modules_;
  mutable std::mutex names_mutex_;
  std::set<std::string> names_;  // of modules_, for those who do not wait for mutex_
  std::atomic<uint64_t> generation_{0};
};

}  // namespace uniep::cuda
