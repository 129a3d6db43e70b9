#include "engine/cuda/place_kernels.h"

namespace uniep::cuda {

KernelRequest place_request() {
  return {"engine/cuda/device/place.cu", "uniep_place", {}};
}
KernelRequest row_of_source_request() {
  return {"engine/cuda/device/place.cu", "uniep_row_of_source", {}};
}
KernelRequest slots_of_map_request() {
  return {"engine/cuda/device/dense.cu", "uniep_slots_of_map", {}};
}
KernelRequest dense_dprobs_request() {
  return {"engine/cuda/device/dense.cu", "uniep_dense_dprobs", {}};
}
KernelRequest program_tables_request() {
  return {"engine/cuda/device/program_tables.cu", "uniep_program_tables", {}};
}

}  // namespace uniep::cuda
