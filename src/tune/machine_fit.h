#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "sim/machine.h"

// The constants of a machine description, fitted to measured times of layers and to numbers of timelines: least squares
// of log(measured / predicted), each constant held to that of a base description as firmly as machines of one kind are
// alike.
namespace uniep::tune {

// A constant that a fit may move.
struct FitConstant {
  std::string key;  // "clock.limit", "tiles[0].cycles", "links[0].rates[0].read"
  bool share;       // moves by addition (a slowdown); else by a factor
  double spread;    // between machines: of its logarithm, or of the share
  double least, most;
};
// Those of a description; of links the rates for so many ranks (1: none).
std::vector<FitConstant> fit_constants(const sim::MachineDescription& machine, int ranks);
double& constant_of(sim::MachineDescription& machine, std::string_view key);

// What was measured beside a layer's time: any time above 0, and the error of its logarithm that no constant explains.
struct FitNumber {
  double measured = 0, error = 0;
};
// That of a layer's time: what the simulator leaves out of calls of one run. Layers of several runs are further apart.
inline constexpr double kLayerError = 0.02, kOtherRunError = 0.03;
// How far the clock of layers that took turns is from the one that a power limit would settle at: common to all of
// them.
inline constexpr double kTurnClockError = 0.02;

struct FitRequest {
  const sim::MachineDescription* base = nullptr;
  bool same_kind = false;                         // as the GPUs that were measured for the base
  int ranks = 1;                                  // of the links that were measured
  std::vector<std::vector<double>> milliseconds;  // of each layer its calls, in the order in which they ran
  // Of each timeline its numbers. It is of one call, so that nothing says how far it would be from another one's.
  std::vector<std::vector<FitNumber>> timelines;
  std::vector<int> timeline_ranks;  // of the links that they tell of, beside `ranks`
  double layer_error = kLayerError;
  // Of each layer the turn in which it was measured, from 0 on; empty: each by itself, under a clock that is known.
  std::vector<std::size_t> turns;
  std::vector<char> held_out;  // layers, then timelines, that are only predicted; empty: none
  // Milliseconds of a layer on a machine. Called from several threads.
  std::function<double(std::size_t layer, const sim::MachineDescription& machine)> predict;
  // Numbers of a timeline, as many as it has there, above 0. Likewise.
  std::function<std::vector<double>(std::size_t timeline, const sim::MachineDescription& machine)> predict_timeline;
  // Whether a layer's time, or a timeline (counted on behind the layers), can follow from a constant; what can not
  // saves a prediction. Empty: all do.
  std::function<bool(std::size_t layer, std::string_view key)> follows;
  int threads = 0;  // 0: one a processor
};

struct FittedConstant {
  FitConstant constant;
  double base = 0, value = 0;
  bool told = false;  // what was measured says more about it than the base did
  // Largest less smallest value that thirds of the calls give by themselves, as a share of the value (of 1 + a share).
  double spread = 0;
};

struct MachineFit {
  sim::MachineDescription machine;
  std::vector<FittedConstant> constants;
  std::vector<double> base_predicted, predicted;               // of all layers
  std::vector<std::vector<double>> base_timelines, timelines;  // of all timelines
  int predictions = 0;                                         // that were made
  // How far thirds of the calls are apart on a layer's time, in the mean. Constants may be further apart than that:
  // what one loses another gains.
  double disagreement = 0;
  bool has_thirds = false;  // else there were too few calls to say so, and spreads are 0
};
// Deterministic. Throws Error(kInvalidArgument) where nothing is to be fitted, and what `predict` throws.
MachineFit fit_machine(const FitRequest& request);

}  // namespace uniep::tune
