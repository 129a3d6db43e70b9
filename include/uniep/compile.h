#pragma once

#include <string>
#include <vector>

#include "uniep/export.h"
#include "uniep/layer.h"

// Kernels of the cuda engine are compiled for a layer's sizes and Schedules on first use, and kept in a folder. A job
// of many processes has them compiled before it starts, by one process, on a machine with or without a GPU; its
// processes then read the folder, which UNIEP_CACHE_DIR names and which they need not be able to write.
namespace uniep {

// What a job calls. A Schedule's fields that are not given are filled as in a call.
struct CompileRequest {
  LayerConfig layer;
  int ranks = 1;
  int workers = 132;  // SMs of a GPU
  PartialSchedule forward, backward;
  // place() comes with each; kLayer: forward, backward and weight gradients, now and later, into matrices that stand
  // one after the other and into those that do not.
  std::vector<Operation> operations = {Operation::kLayer, Operation::kDispatch, Operation::kCombine};
};

struct KernelFile {
  std::string name;  // its source, and the values that it is compiled for
  std::string path;
  bool was_there = false;
  double seconds = 0;  // that compiling took
};

// Compiles what the folder lacks, with so many threads (0: one a processor). Throws Error: kInvalidArgument for sizes
// and Schedules that are not legal, and where others may write the folder; kUnsupported without NVRTC, or where the
// engine has no such kernel; kIo where the folder cannot be written.
UNIEP_API std::vector<KernelFile> compile_kernels(const CompileRequest& request, const std::string& folder,
                                                  int threads = 0);

}  // namespace uniep
