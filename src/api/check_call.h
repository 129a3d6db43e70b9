#pragma once

#include <string>

#include "engine/engine.h"
#include "uniep/layer.h"

// What all calls of a Group check before anything runs.
namespace uniep::api {

// Throws Error(kInvalidArgument).
[[noreturn]] void refuse(const std::string& message);

void check_call(const Group& group, const LayerConfig& config, const Schedule& schedule, Direction direction,
                const Placement& placement, std::size_t arguments, Operation operation = Operation::kLayer);

void check_array(const void* array, const char* name, int rank, bool needed);

// Runs a collective call. What it throws the other ranks hear of, too.
template <typename Run>
auto collective(Group& group, Run&& run) {
  internal::Engine& engine = group.implementation();
  engine.begin_collective();
  try {
    return run();
  } catch (const std::exception& error) {
    engine.give_up(error);
    throw;
  }
}

}  // namespace uniep::api
