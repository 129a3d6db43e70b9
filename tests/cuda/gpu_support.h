#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/kernel.h"
#include "uniep/error.h"

// What the GPU tests share: device memory, kernels by file, comparison of bytes, and a table of results.
namespace uniep::cuda::test {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes) : bytes_(bytes) {
    check(driver().cuMemAlloc(&address_, static_cast<size_t>(bytes > 0 ? bytes : 16)), "cuMemAlloc");
  }
  Buffer(Buffer&& other) noexcept : address_(std::exchange(other.address_, 0)), bytes_(other.bytes_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() {
    if (address_ != 0) driver().cuMemFree(address_);
  }

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }
  int64_t bytes() const { return bytes_; }

  void set_bytes(unsigned char value) const {
    check(driver().cuMemsetD8Async(address_, value, static_cast<size_t>(bytes_), nullptr), "cuMemsetD8Async");
  }
  template <typename T>
  void upload(const std::vector<T>& values) const {
    check(driver().cuMemcpyHtoDAsync(address_, values.data(), values.size() * sizeof(T), nullptr), "cuMemcpyHtoD");
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  }
  template <typename T>
  std::vector<T> download(size_t count) const {
    std::vector<T> values(count);
    check(driver().cuMemcpyDtoHAsync(values.data(), address_, count * sizeof(T), nullptr), "cuMemcpyDtoH");
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
    return values;
  }

 private:
  CUdeviceptr address_ = 0;
  int64_t bytes_ = 0;
};

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

inline std::string read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(Status::kIo, "can not read " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Where the sources of the tests' kernels lie: UNIEP_TEST_KERNELS, or this folder.
inline std::string kernel_folder() {
  const std::string path = __FILE__;
  const char* const given = std::getenv("UNIEP_TEST_KERNELS");
  return given != nullptr ? given : path.substr(0, path.rfind('/'));
}

// Kernels out of a file beside the tests, or out of the embedded sources.
class Kernels {
 public:
  Kernels(int device, std::string folder) : store_(device), folder_(std::move(folder)) {}

  template <typename Arguments>
  void run(const std::string& file, const char* function, const Launch& launch, Arguments arguments,
           const std::vector<std::string>& macros = kNoMacros) {
    launch_kernel(store_.get(request(folder_, file, function, macros), launch.shared_bytes), launch, &arguments,
                  function);
  }

  // Of the functions of this file that have run.
  int local_bytes(const std::string& file) { return store_.local_bytes(request(folder_, file, "")); }

  static KernelRequest request(const std::string& folder, const std::string& file, const char* function,
                               const std::vector<std::string>& macros = kNoMacros) {
    KernelRequest request{file, function, macros};
    if (file.find('/') == std::string::npos) {
      request.text = with_test_headers(folder, read_text(folder + "/" + file));
    }
    return request;
  }

 private:
  // NVRTC knows the embedded headers only: those of the tests are put in their place.
  static std::string with_test_headers(const std::string& folder, std::string text) {
    const std::string begin = "#include \"tests/cuda/";
    for (size_t at = text.find(begin); at != std::string::npos; at = text.find(begin)) {
      const size_t end = text.find('"', at + begin.size());
      std::string header = read_text(folder + "/" + text.substr(at + begin.size(), end - at - begin.size()));
      header.replace(header.find("#pragma once"), std::strlen("#pragma once"), "");
      text.replace(at, end + 1 - at, header);
    }
    return text;
  }

  // ptx_kernels.cu is one source whose wgmma kernel has a size.
  static inline const std::vector<std::string> kNoMacros = {"TEST_N=64", "TEST_MAJOR_A=0", "TEST_MAJOR_B=0"};

  KernelStore store_;
  std::string folder_;
};

struct Results {
  int passed = 0;
  int failed = 0;

  void record(const std::string& name, bool good, const std::string& detail = "") {
    (good ? passed : failed) += 1;
    if (!good || verbose) std::printf("%-4s %s %s\n", good ? "ok" : "FAIL", name.c_str(), detail.c_str());
    std::fflush(stdout);
  }
  bool verbose = false;
};

// What main() of such a program does: its exit status is 77 without a Hopper GPU, and 1 after an exception. Ranks on
// one GPU and collectives beside them wait for each other on streams of their own, which with one connection to the
// GPU, as Megatron asks for, hold each other up.
inline int run_on_hopper(int (*run)(int, char**), int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a test that is cut has said how far it came
  try {
    require_hopper(0);
  } catch (const Error& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}

}  // namespace uniep::cuda::test
