#pragma once

#include "engine/cuda/kernels/exchange.h"
#include "program/build.h"
#include "uniep/layer.h"

namespace uniep::cuda {

// The Program of a dispatch or combine alone, on a machine of so many SMs a rank. Throws Error(kUnsupported) where
// tokens have more slots or groups than the kernel sums.
ProgramRequest exchange_program(const LayerConfig& config, const Schedule& schedule, ProgramPart part, int workers);

// The kernel that runs it.
ExchangeConfig exchange_config(const ProgramRequest& asked);

}  // namespace uniep::cuda
