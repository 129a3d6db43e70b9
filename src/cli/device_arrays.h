#pragma once

#include "train/device_arrays.h"

namespace uniep::cli {

// The arrays that `uniep train` has on GPUs. Lives as long as the program.
const train::DeviceArrays& device_arrays();

}  // namespace uniep::cli
