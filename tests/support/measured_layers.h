#pragma once

#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "sim/simulate.h"
#include "tune/machine_fit.h"

// Measured times of layers (tests/data/measured_layers.json) beside what the simulator says.
namespace uniep::test {

struct MeasuredLayer {
  std::string session;  // one run, or runs next to each other
  bool cell = false;    // the session's first layer is the base of the second
  std::string machine, schedule, routing, wgrad;
  LayerShape shape;
  int ranks = 1;
  int64_t tokens = 0;
  Direction direction = Direction::kForward;
  bool ascending_sums = false;  // tokens were summed in ascending order then
  sim::State state = sim::State::kSustained;
  double ms = 0;
  bool held_out = false;
};
std::vector<MeasuredLayer> read_measured_layers(const std::string& path);

struct PredictedLayer {
  double simulated = 0;
  double gemms = 0;  // its tiles alone, on all workers
  double links = 0;  // what its links carry
  double clock_ghz = 0;
};

// Predicts measured layers; keeps the placements that it has made.
class LayerPredictor {
 public:
  // `near_ghz`: as in sim::SimulateOptions.
  PredictedLayer predict(const MeasuredLayer& layer, const sim::MachineDescription& machine, double near_ghz = 0);
  // A request's predict and follows, for a fit to these layers from request.base, which must outlive the request.
  void add_to(tune::FitRequest& request, const std::vector<MeasuredLayer>& layers);

 private:
  program::Program program_of(const MeasuredLayer& layer, const sim::MachineDescription& machine);
  using Key = std::tuple<int64_t, int64_t, int, int64_t, std::string, bool>;  // experts, topk, ranks, tokens, ...
  std::map<Key, std::shared_ptr<const internal::PlacementState>> placements_;
};

// (predicted / measured - 1) of the wanted layers: absolute, and as ratios inside a session: a cell's second layer by
// its first, other sessions by the geometric mean of `scale_by`, or of all, of them.
struct PredictionErrors {
  std::vector<double> ratio, absolute;
  static double mean(const std::vector<double>& errors);
  static double quantile(std::vector<double> errors, double share);
};
PredictionErrors prediction_errors(const std::vector<MeasuredLayer>& layers, const std::vector<double>& predicted,
                                   bool held_out);

}  // namespace uniep::test
