#pragma once

#include "engine/cuda/run_time_compiler.h"

// The kernels that place tokens (device/place.cu) and build Programs' tables (device/program_tables.cu).
namespace uniep::cuda {

KernelRequest place_request();
KernelRequest row_of_source_request();
KernelRequest program_tables_request();
// Between dense routing and slots (device/dense.cu).
KernelRequest slots_of_map_request();
KernelRequest dense_dprobs_request();

}  // namespace uniep::cuda
