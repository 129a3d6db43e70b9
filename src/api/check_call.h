#pragma once

#include <new>
#include <string>

#include "engine/engine.h"
#include "uniep/layer.h"

// What all calls of a Group check before anything runs.
namespace uniep::api {

// Throws Error(kInvalidArgument).

struct GivenCall {
  const LayerConfig& config;
  const Schedule& schedule;
  Direction direction;
  const Placement& placement;
  Operation operation = Operation::kLayer;
};
// That the Schedule is legal for this group's layer.
void check_schedule(const Group& group, const LayerConfig& config, const Schedule& schedule, Direction direction,
                    Operation operation = Operation::kLayer);
void check_call(const Group& group, const GivenCall& call, std::size_t arguments);

void check_array(const void* array, const char* name, int rank, bool needed);

// That what a call made or is given belongs to this group.
template <typename State>
void check_owner(const State& state, const Group& group, const char* name) {
  if (state.owner == group.implementation().number()) return;
  throw Error(Status::kInvalidArgument, std::string(name) + ": of another group");
}

// Runs a call. Where the C++ heap has no room it throws an Error, as for any other memory.
template <typename Run>
auto with_heap(Run&& run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    throw Error(Status::kOutOfMemory, "the C++ heap has no room");
  }
}

// Runs a call that is not collective, inside of the group's gate.
template <typename Run>
auto inside(const Group& group, Run&& run) {
  const internal::CallGate::Inside inside(group.implementation().gate());
  return with_heap(run);
}

// Runs a collective call. What it throws the other ranks hear of, too.
template <typename Run>
auto collective(Group& group, Run&& run) {
  internal::Engine& engine = group.implementation();
  const internal::CallGate::Inside inside(engine.gate());
  engine.begin_collective();
  try {
    return with_heap(run);
  } catch (const std::exception& error) {
    engine.give_up(error);
    throw;
  }
}

// What is to be right before a collective call can be made: where it throws, the call was one that threw.
template <typename Check>
auto before_collective(Group& group, Check&& check) {
  try {
    return with_heap(check);
  } catch (const std::exception&) {
    collective(group, [] { throw; });
    throw;
  }
}

}  // namespace uniep::api
