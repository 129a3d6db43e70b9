#pragma once

#include <optional>

#include "engine/cuda/memory/symmetric_region.h"
#include "engine/engine.h"
#include "program/build.h"
#include "program/edges.h"

// What a call asks of a group on GPUs like `machine`'s, which need not be there.
namespace uniep::cuda {

// The Program of one direction. Throws Error (kUnsupported) where no kernel runs it.
ProgramRequest call_request(const Machine& machine, const LayerConfig& config, const Schedule& schedule,
                            Direction direction, const MemoryOptions& use = {});
// Of the forward stages that backward runs first with save.z = recompute.
std::optional<ProgramRequest> recompute_request(const Machine& machine, const LayerConfig& config,
                                                const Schedule& backward);

SymmetricNeed symmetric_need(const Machine& machine, const ProgramRequest& request,
                             const internal::PlacementState& placement, const SignalLayout& layout,
                             int copied_operands);

}  // namespace uniep::cuda
