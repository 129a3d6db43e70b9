#pragma once

#include <cstdlib>

#include "engine/cuda/runtime/dynamic_library.h"

// The stand-in for the CUDA driver and NVRTC, in this process: what a test asks it for (support/fake_cuda.h).
namespace uniep::test {

struct FakeCuda {
  FakeCuda() {
    ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
    ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
    const cuda::DynamicLibrary library("the stand-in", "UNIEP_LIBCUDA", {});
    library.bind(live, "fake_cuda_live");
    library.bind(modules, "fake_cuda_modules");
    library.bind(failures, "fake_cuda_failures");
    library.bind(kernels_behind_events, "fake_cuda_kernels_behind_events");
    library.bind(layer_ctas, "fake_cuda_layer_ctas");
    library.bind(layer_is_cooperative, "fake_cuda_layer_is_cooperative");
    library.bind(reset, "fake_cuda_reset");
    library.bind(capture, "fake_cuda_capture");
    library.bind(replay, "fake_cuda_replay");
    library.bind(fail_call, "fake_cuda_fail_call");
    library.bind(spill, "fake_cuda_spill");
    library.bind(launches, "fake_cuda_launches");
  }
  int (*live)() = nullptr;
  int (*modules)() = nullptr;
  int (*failures)() = nullptr;
  int (*kernels_behind_events)() = nullptr;
  int (*layer_ctas)() = nullptr;
  int (*layer_is_cooperative)() = nullptr;
  void (*reset)() = nullptr;
  void (*capture)(int) = nullptr;
  void (*replay)(int) = nullptr;
  void (*fail_call)() = nullptr;
  void (*spill)(int) = nullptr;
  int (*launches)(const char*) = nullptr;
};

inline const FakeCuda& fake() {
  static const FakeCuda loaded;
  return loaded;
}

}  // namespace uniep::test
