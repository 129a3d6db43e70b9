#pragma once

#include <cuda.h>

#include "engine/cuda/runtime/dynamic_library.h"

namespace uniep::cuda::test {

// The driver's functions for CUDA graphs, which the library itself does not need.
struct GraphFunctions {
  decltype(&::cuStreamBeginCapture) begin_capture;
  decltype(&::cuStreamEndCapture) end_capture;
  decltype(&::cuGraphInstantiateWithFlags) instantiate;
  decltype(&::cuGraphLaunch) launch;
  decltype(&::cuGraphExecDestroy) destroy_executable;
  decltype(&::cuGraphDestroy) destroy;

  GraphFunctions() {
    static const DynamicLibrary library("the CUDA driver", "UNIEP_LIBCUDA", {"libcuda.so.1"});
    library.bind(begin_capture, "cuStreamBeginCapture_v2");
    library.bind(end_capture, "cuStreamEndCapture");
    library.bind(instantiate, "cuGraphInstantiateWithFlags");
    library.bind(launch, "cuGraphLaunch");
    library.bind(destroy_executable, "cuGraphExecDestroy");
    library.bind(destroy, "cuGraphDestroy");
  }
};

}  // namespace uniep::cuda::test
