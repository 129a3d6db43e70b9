#pragma once

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/dynamic_library.h"

namespace uniep::cuda::test {

// Holds a stream up by a function of the host: no SM is taken meanwhile, and kernels that need all of them can run on
// other streams.
inline void hold_up_on_host(CUstream stream, int milliseconds) {
  static const DynamicLibrary library("the CUDA driver", "UNIEP_LIBCUDA", {"libcuda.so.1"});
  static const auto launch = [] {
    decltype(&::cuLaunchHostFunc) function = nullptr;
    library.bind(function, "cuLaunchHostFunc");
    return function;
  }();
  const auto wait = [](void* duration) {
    std::this_thread::sleep_for(std::chrono::milliseconds(reinterpret_cast<std::intptr_t>(duration)));
  };
  check(launch(stream, wait, reinterpret_cast<void*>(static_cast<std::intptr_t>(milliseconds))), "cuLaunchHostFunc");
}

}  // namespace uniep::cuda::test
