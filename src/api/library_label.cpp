#include "engine/cuda/calls/engine.h"
#include "uniep/libraries.h"
#include "uniep/version.h"

std::string uniep::library_label() {
  return "uniep " UNIEP_VERSION_STRING ", " + cuda::kernels_label();
}
