#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/layer_options.h"
#include "cli/trace_file.h"
#include "sim/simulate.h"

// What a timeline's mark says of its call beside shape and Schedule, so that it can be simulated again: words as the
// options of `uniep run` take them.
namespace uniep::cli {

// Words of a mark's state and of a routing that is no kind.
inline constexpr const char* kSustained = "sustained";
inline constexpr const char* kPaused = "paused";
inline constexpr const char* kRoutingFromFile = "file";

// Where a call ran.
struct TracedMachine {
  std::string engine;               // "cpu", "cuda" or "simulator"
  std::string device;               // the GPU's name, or the simulated machine's
  int gpus = 0, compute_units = 0;  // how many of them, and what each has
  int workers = 0;                  // of a rank
};
// Of a group's first local rank.
TracedMachine traced_machine(const Group& group);

// A mark's arguments. `state`: empty where nobody knows at which clocks the call ran.
TracedLayer traced_layer(const LayerOptions& layer, const Schedule& schedule, const TracedMachine& machine,
                         std::optional<sim::State> state = {});

// A mark, read again.
struct TracedRun {
  Direction direction = Direction::kForward;
  LayerOptions layer;  // engine, ranks, shape, tokens, routing, seed, workers, numerics and the direction's schedule
  TracedMachine machine;
  std::optional<sim::State> state;
};
// Throws Error(kInvalidArgument) for a mark that does not say all of it, that says what is not legal, or whose call no
// simulated GPU stands for: of the cpu engine, of virtual ranks, of a routing from a file.
TracedRun traced_run(const TraceMark& mark);

}  // namespace uniep::cli
