#pragma once

#include <string>

namespace uniep::cuda {

// What NVML, the driver's library for managing GPUs, says of one. What it does not say is empty.
struct GpuState {
  std::string serial;         // "serial number ...", the GPU's unique id, or where it is on the bus
  std::string driver;         // the driver's version
  int power_limit_watts = 0;  // that is enforced now
};
GpuState gpu_state(int device);

}  // namespace uniep::cuda
