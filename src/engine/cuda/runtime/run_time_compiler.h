#pragma once

#include <span>
#include <string>
#include <vector>

namespace uniep::cuda {

// One kernel to compile: an embedded source, its function, and macros that configure it ("NAME=value").
struct KernelRequest {
  std::string source;
  std::string function;
  std::vector<std::string> macros;
  std::string text = {};  // tests: the source itself, when it is not embedded

  // For messages: source and macros.
  std::string description() const;
};

// Without those that another one's module has: functions of one source with the same macros share it.
std::vector<KernelRequest> distinct_modules(std::span<const KernelRequest> requests);

// What ptxas said about one function.
struct ResourceUse {
  int registers = 0;
  int stack_bytes = 0;
  int spill_bytes = 0;
  std::vector<std::string> advisories;  // setmaxnreg ignored, wgmma serialised, and other warnings
};

struct CompiledKernel {
  std::string cubin;
  ResourceUse use;
  bool from_cache = false;
  double seconds = 0;  // that compiling took
};

// Reads registers, stack, spills and advisories of `function` out of a compiler log.
ResourceUse parse_resource_use(const std::string& log, const std::string& function);

// The compiler's version, as part of cache keys: "13.0". Throws uniep::Error (kUnsupported) where there is none.
std::string compiler_version();
// What tells builds of one version apart: the name and the size of the file that NVRTC was loaded from.
std::string compiler_build();

// The options that every kernel is compiled with.
const std::vector<std::string>& common_options();

// Compiles without looking at the cache. Throws uniep::Error (kInternal) with the kernel's name, options and the log.
CompiledKernel compile_kernel(const KernelRequest& request);

class KernelCache;

// Takes kernels from the cache or compiles them, several at once (`threads` <= 0: one a processor). Same order.
std::vector<CompiledKernel> compile_kernels(const std::vector<KernelRequest>& requests, const KernelCache& cache,
                                            int threads);
// With the process's own cache.
std::vector<CompiledKernel> compile_kernels(const std::vector<KernelRequest>& requests, int threads = 0);

}  // namespace uniep::cuda
