#pragma once

#include <string>

#include "uniep/layer.h"

// What all calls of a Group check before anything runs.
namespace uniep::api {

// Throws Error(kInvalidArgument).
[[noreturn]] void refuse(const std::string& message);

void check_call(const Group& group, const LayerConfig& config, const Schedule& schedule, Direction direction,
                const Placement& placement, std::size_t arguments, Operation operation = Operation::kLayer);

void check_array(const void* array, const char* name, int rank, bool needed);

}  // namespace uniep::api
