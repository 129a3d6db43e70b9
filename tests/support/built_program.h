#pragma once

#include <functional>
#include <memory>
#include <string>

#include "program/checker.h"
#include "support/random_layer.h"

namespace uniep::test {

// A Program of a random layer under a random legal Schedule.
struct BuiltProgram {
  RandomLayer layer;
  std::shared_ptr<const internal::PlacementState> placement;
  std::unique_ptr<Program> program;
  std::string text;
};

// `workers` 0: a random number.
BuiltProgram build(uint64_t seed, Direction direction, const RandomLayerLimits& limits = {},
                   const PartialSchedule& fixed = {}, int workers = 0);

// Tries seeds until the tampering met something to falsify, and fails unless the checker noticed each time.
void expect_noticed(Direction direction, const std::string& fixed,
                    const std::function<CheckTampering(bool& touched)>& tampering, bool flat_only = false,
                    int workers = 0);

}  // namespace uniep::test
