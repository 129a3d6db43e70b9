#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "support/measured_layers.h"

// How far the simulator is from measured layers. Held out are, in each session, some Schedules with all their
// repetitions; another session may have fitted constants to the same Schedule.
//   UNIEP_PRINT_POINTS=1 simulate_error_test   prints every point
namespace uniep::test {
namespace {

constexpr double kMaxRatioError = 0.025;     // in the mean, held out, inside a session
constexpr double kMaxAbsoluteError = 0.035;  // in the mean, held out

struct Predicted {
  std::vector<MeasuredLayer> layers;
  std::vector<double> simulated, gemms, roof;
};

const Predicted& predictions() {
  static const Predicted all = [] {
    Predicted made;
    made.layers = read_measured_layers(std::string(UNIEP_TEST_DATA) + "/measured_layers.json");
    LayerPredictor predictor;
    for (const MeasuredLayer& layer : made.layers) {
      const PredictedLayer predicted = predictor.predict(layer, sim::shipped_machine(layer.machine));
      made.simulated.push_back(predicted.simulated);
      made.gemms.push_back(1.1 * predicted.gemms);
      made.roof.push_back(1.06 * std::max(predicted.gemms, predicted.links));
      if (std::getenv("UNIEP_PRINT_POINTS") == nullptr) continue;
      fmt::print("{:24} {:9} {},{},{},{} W{} T{} {} {} {:8.3f} {:8.3f} {:+.1f} %{}\n", layer.session, layer.machine,
                 layer.shape.hidden, layer.shape.intermediate, layer.shape.experts, layer.shape.topk, layer.ranks,
                 layer.tokens, layer.direction == Direction::kForward ? "forward" : "backward", layer.schedule,
                 layer.ms, predicted.simulated, 100 * (predicted.simulated / layer.ms - 1),
                 layer.held_out ? " held out" : "");
    }
    return made;
  }();
  return all;
}

PredictionErrors report(const char* name, const std::vector<double>& predicted, bool held_out) {
  PredictionErrors errors = prediction_errors(predictions().layers, predicted, held_out);
  fmt::print("{:<34} {:<9} ratios: {:3} mean {:.2f} % median {:.2f} 90 % {:.2f}; absolute: {:3} mean {:.2f} %\n", name,
             held_out ? "held out" : "fitted", errors.ratio.size(), 100 * PredictionErrors::mean(errors.ratio),
             100 * PredictionErrors::quantile(errors.ratio, 0.5), 100 * PredictionErrors::quantile(errors.ratio, 0.9),
             errors.absolute.size(), 100 * PredictionErrors::mean(errors.absolute));
  return errors;
}

TEST(SimulateError, OfHeldOutLayersIsSmallAndBelowTheBaselines) {
  const Predicted& all = predictions();
  ASSERT_GE(all.layers.size(), 300u);
  report("simulator", all.simulated, false);
  const PredictionErrors errors = report("simulator", all.simulated, true);
  const PredictionErrors constant = report("GEMMs times 1.1", all.gemms, true);
  const PredictionErrors roof = report("1.06 times max of GEMMs and links", all.roof, true);
  ASSERT_GE(errors.ratio.size(), all.layers.size() / 4);
  EXPECT_LT(PredictionErrors::mean(errors.ratio), kMaxRatioError);
  EXPECT_LT(PredictionErrors::quantile(errors.ratio, 0.9), 0.05);
  EXPECT_LT(PredictionErrors::mean(errors.absolute), kMaxAbsoluteError);
  for (const PredictionErrors& baseline : {constant, roof}) {
    EXPECT_LT(PredictionErrors::mean(errors.ratio), 0.75 * PredictionErrors::mean(baseline.ratio));
    EXPECT_LT(PredictionErrors::mean(errors.absolute), PredictionErrors::mean(baseline.absolute));
  }
}

}  // namespace
}  // namespace uniep::test
