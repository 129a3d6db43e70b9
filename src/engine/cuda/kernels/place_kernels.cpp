#include "engine/cuda/kernels/place_kernels.h"

#include "engine/cuda/kernels/exchange.h"

namespace uniep::cuda {

KernelRequest place_request() {
  return {"engine/cuda/device/kernels/place.cu", "uniep_place", {}};
}
KernelRequest row_of_source_request() {
  return {"engine/cuda/device/kernels/place.cu", "uniep_row_of_source", {}};
}
KernelRequest slots_of_map_request() {
  return {"engine/cuda/device/kernels/dense.cu", "uniep_slots_of_map", {}};
}
KernelRequest dense_dprobs_request() {
  return {"engine/cuda/device/kernels/dense.cu", "uniep_dense_dprobs", {}};
}
KernelRequest program_tables_request() {
  return {"engine/cuda/device/kernels/program_tables.cu", "uniep_program_tables", {}};
}
KernelRequest call_times_request() {
  return {"engine/cuda/device/kernels/call_times.cu", "uniep_call_times", {}};
}
KernelRequest empty_nan_request() {
  return {"engine/cuda/device/kernels/empty_nan.cu", "uniep_empty_nan", {}};
}
std::vector<KernelRequest> placement_kernels() {
  return {place_request(),        row_of_source_request(), program_tables_request(), slots_of_map_request(),
          dense_dprobs_request(), call_times_request(),    empty_nan_request(),      begin_call_request()};
}

}  // namespace uniep::cuda
