#pragma once

#include <vector>

#include "engine/cuda/runtime/run_time_compiler.h"

// The kernels that place tokens (device/kernels/place.cu), build Programs' tables (device/kernels/program_tables.cu)
// and time calls (device/kernels/call_times.cu).
namespace uniep::cuda {

KernelRequest place_request();
KernelRequest row_of_source_request();
KernelRequest program_tables_request();
// Between dense routing and slots (device/kernels/dense.cu).
KernelRequest slots_of_map_request();
KernelRequest dense_dprobs_request();
KernelRequest call_times_request();
// NaN where a placement has no rows (device/kernels/empty_nan.cu).
KernelRequest empty_nan_request();

// All that place() launches, and calls beside their own.
std::vector<KernelRequest> placement_kernels();

}  // namespace uniep::cuda
