#include "engine/cuda/runtime/run_time_compiler.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <mutex>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>

#include "engine/cuda/runtime/dynamic_library.h"
#include "engine/cuda/runtime/kernel_cache.h"
#include "engine/cuda/runtime/kernel_variant.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

// NVRTC's interface, declared here so that its header is not needed to build.
struct Nvrtc {
  using Program = struct OpaqueProgram*;
  int (*version)(int*, int*);
  const char* (*error_string)(int);
  int (*create_program)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile_program)(Program, int, const char* const*);
  int (*destroy_program)(Program*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
};

const Nvrtc& nvrtc() {
  static const Nvrtc table = [] {
    static const DynamicLibrary library(
        "NVRTC (CUDA's run-time compiler)", "UNIEP_LIBNVRTC",
        {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"}, "nvrtc");
    Nvrtc t{};
    library.bind(t.version, "nvrtcVersion");
    library.bind(t.error_string, "nvrtcGetErrorString");
    library.bind(t.create_program, "nvrtcCreateProgram");
    library.bind(t.compile_program, "nvrtcCompileProgram");
    library.bind(t.destroy_program, "nvrtcDestroyProgram");
    library.bind(t.cubin_size, "nvrtcGetCUBINSize");
    library.bind(t.cubin, "nvrtcGetCUBIN");
    library.bind(t.log_size, "nvrtcGetProgramLogSize");
    library.bind(t.log, "nvrtcGetProgramLog");
    return t;
  }();
  return table;
}

void check_nvrtc(int result, const char* action) {
  if (result == 0) return;
  throw Error(Status::kInternal, std::string(action) + " failed: " + nvrtc().error_string(result));
}

int integer_after(const std::string& line, const std::string& word) {
  const size_t at = line.find(word);
  return at == std::string::npos ? 0 : std::atoi(line.c_str() + at + word.size());
}

int integer_before(const std::string& line, const std::string& word) {
  const size_t at = line.find(word);
  if (at == std::string::npos) return 0;
  size_t begin = at;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(line[begin - 1])) != 0) --begin;
  return std::atoi(line.substr(begin, at - begin).c_str());
}

}  // namespace

std::string KernelRequest::description() const {
  std::string words = source;
  for (const std::string& macro : macros) words += " " + macro;
  return words;
}

std::vector<KernelRequest> distinct_modules(std::span<const KernelRequest> requests) {
  std::vector<KernelRequest> distinct;
  std::set<std::string> seen;
  for (const KernelRequest& request : requests) {
    if (seen.insert(request.description()).second) distinct.push_back(request);
  }
  return distinct;
}

ResourceUse parse_resource_use(const std::string& log, const std::string& function) {
  ResourceUse use;
  bool current = false;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    const bool is_function = line.find("Compiling entry function '") != std::string::npos ||
                             line.find("Function properties for ") != std::string::npos;
    if (is_function) current = line.find(function) != std::string::npos;
    const bool advises = line.find("warning") != std::string::npos || line.find("advisory") != std::string::npos ||
                         line.find("Potential Performance Loss") != std::string::npos ||
                         line.find("setmaxnreg ignored") != std::string::npos;
    if (advises) use.advisories.push_back(line);
    if (!current) continue;
    if (line.find("bytes stack frame") != std::string::npos) {
      use.stack_bytes = integer_before(line, " bytes stack frame");
      use.spill_bytes = integer_before(line, " bytes spill stores") + integer_before(line, " bytes spill loads");
    }
    if (line.find("Used ") != std::string::npos) use.registers = integer_after(line, "Used ");
  }
  return use;
}

std::string compiler_version() {
  int major = 0;
  int minor = 0;
  check_nvrtc(nvrtc().version(&major, &minor), "nvrtcVersion");
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string compiler_build() {
  Dl_info loaded{};
  if (::dladdr(reinterpret_cast<const void*>(nvrtc().version), &loaded) == 0 || loaded.dli_fname == nullptr) return "";
  std::error_code error;
  const std::filesystem::path file = std::filesystem::canonical(loaded.dli_fname, error);
  const std::uintmax_t bytes = error ? 0 : std::filesystem::file_size(file, error);
  return file.filename().string() + " " + std::to_string(bytes);
}

const std::vector<std::string>& common_options() {
  // -fmad=false: the compiler must have no freedom that changes bits.
  static const std::vector<std::string> options = [] {
    std::vector<std::string> all = {"--gpu-architecture=sm_90a", "--std=c++20",        "--fmad=false",
                                    "-default-device",           "--ptxas-options=-v", "--generate-line-info"};
    if (const char* debug = std::getenv("UNIEP_BOUNDED_WAITS"); debug != nullptr && debug[0] == '1') {
      all.emplace_back("-DUNIEP_BOUNDED_WAITS");
    }
    return all;
  }();
  return options;
}

CompiledKernel compile_kernel(const KernelRequest& request) {
  const auto begin = std::chrono::steady_clock::now();
  const SourceSet& sources = sources_of_kernel(request.source);
  Nvrtc::Program program = nullptr;
  const char* const text = request.text.empty() ? sources.text_of(request.source) : request.text.c_str();
  check_nvrtc(nvrtc().create_program(&program, text, request.source.c_str(), static_cast<int>(sources.texts.size()),
                                     sources.texts.data(), sources.names.data()),
              "nvrtcCreateProgram");
  std::vector<std::string> options = common_options();
  options.insert(options.end(), sources.options.begin(), sources.options.end());
  for (const std::string& macro : request.macros) options.push_back("-D" + macro);
  std::vector<const char*> option_texts;
  for (const std::string& option : options) option_texts.push_back(option.c_str());
  const int result = nvrtc().compile_program(program, static_cast<int>(option_texts.size()), option_texts.data());
  size_t log_size = 0;
  nvrtc().log_size(program, &log_size);
  std::string log(log_size, '\0');
  if (log_size > 0) nvrtc().log(program, log.data());
  while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
  if (result != 0) {
    nvrtc().destroy_program(&program);
    std::string given;
    for (const std::string& option : options) given += " " + option;
    throw Error(Status::kInternal, "device kernel " + request.description() + " does not compile with options" + given +
                                       ": " + nvrtc().error_string(result) + "\n" + log);
  }
  CompiledKernel kernel;
  kernel.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  size_t size = 0;
  nvrtc().cubin_size(program, &size);
  kernel.cubin.resize(size);
  nvrtc().cubin(program, kernel.cubin.data());
  nvrtc().destroy_program(&program);
  kernel.use = parse_resource_use(log, request.function);
  return kernel;
}

std::vector<CompiledKernel> compile_kernels(const std::vector<KernelRequest>& requests, const KernelCache& cache,
                                            int threads) {
  std::vector<CompiledKernel> kernels(requests.size());
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    for (size_t i = next++; i < requests.size(); i = next++) {
      try {
        const std::string key = cache_key(requests[i]);
        if (cache.load(key, kernels[i].cubin)) {
          kernels[i].from_cache = true;
        } else {
          kernels[i] = compile_kernel(requests[i]);
          cache.store(key, kernels[i].cubin);
        }
      } catch (...) {
        const std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  const int limit = threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  {
    std::vector<std::jthread> others;
    others.reserve(requests.size());
    try {
      for (int i = 1; i < limit && i < static_cast<int>(requests.size()); ++i) others.emplace_back(work);
    } catch (const std::system_error&) {  // those that there are compile all
    }
    work();
  }
  if (failure) std::rethrow_exception(failure);
  return kernels;
}

std::vector<CompiledKernel> compile_kernels(const std::vector<KernelRequest>& requests, int threads) {
  return compile_kernels(requests, KernelCache(), threads);
}

}  // namespace uniep::cuda
