#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <mutex>
#include <span>

#include "cli/calibration_model.h"
#include "io/file.h"
#include "support/measured_layers.h"
#include "tune/machine_fit.h"

// Fits the shipped description of the H200 anew, from itself, to what was recorded of layers (but what
// simulate_error_test holds out) and to what `uniep calibrate --raw` wrote:
//   refit_shipped tests/data/measured_layers.json machines/h200.json CALIBRATION...
namespace uniep {
namespace {

using sim::MachineDescription;

// LayerPredictors for as many threads as ask.
class Predictors {
 public:
  double ms(const test::MeasuredLayer& layer, const MachineDescription& machine) {
    std::unique_ptr<test::LayerPredictor> own;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) own = std::move(free_.back()), free_.pop_back();
    }
    if (!own) own = std::make_unique<test::LayerPredictor>();
    const double ms = own->predict(layer, machine).simulated;
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(own));
    return ms;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<test::LayerPredictor>> free_;
};

// Whether a layer's time can follow from a constant; what can not saves a prediction.
bool follows(const test::MeasuredLayer& layer, std::string_view key) {
  const auto has = [&](const char* text) { return layer.schedule.find(text) != std::string::npos; };
  const bool paused = layer.state == sim::State::kPaused, on_sms = has("where=sms");
  if (key.starts_with("links")) return layer.ranks == 2;
  if (key == "clock.limit" || key == "clock.rest") return !paused;
  if (key.starts_with("clock.pause")) return paused;
  if (key == "copy.push") return has("push");
  if (key == "copy.send") return has("staged") && !on_sms;
  if (key.starts_with("port")) return on_sms;
  if (key.starts_with("copy") && key != "copy.task") return !on_sms;
  if (key == "slowdown.static_queue") return has("queue=static");
  return true;
}

MachineDescription refitted(const std::string& recorded, std::span<const std::string> files) {
  const MachineDescription& base = sim::shipped_machine("h200");
  std::vector<test::MeasuredLayer> layers;
  for (test::MeasuredLayer& layer : test::read_measured_layers(recorded)) {
    if (layer.machine == "h200" && !layer.held_out) layers.push_back(std::move(layer));
  }
  std::vector<std::unique_ptr<cli::CalibrationModel>> models;
  std::vector<std::pair<std::size_t, std::size_t>> measured;  // a model, a layer
  tune::FitRequest request;
  for (const test::MeasuredLayer& layer : layers) request.milliseconds.push_back({layer.ms});
  for (const std::string& file : files) {
    const tune::Calibration calibration = tune::parse_calibration(io::read_text_file(file), file);
    models.push_back(std::make_unique<cli::CalibrationModel>(calibration.layers, base));
    for (std::size_t i = 0; i < models.back()->layers().size(); ++i) {
      if (models.back()->layers()[i].held_out) continue;
      measured.emplace_back(models.size() - 1, i);
      request.milliseconds.push_back(models.back()->layers()[i].milliseconds);
    }
  }
  fmt::print("{} recorded layers, {} of calibrations\n", layers.size(), measured.size());
  Predictors predictors;
  request.base = &base;
  request.ranks = 2;
  request.layer_error = tune::kOtherRunError;
  request.predict = [&](std::size_t i, const MachineDescription& machine) {
    if (i < layers.size()) return predictors.ms(layers[i], machine);
    const auto [model, layer] = measured[i - layers.size()];
    return models[model]->milliseconds(layer, machine);
  };
  request.follows = [&](std::size_t i, std::string_view key) {
    if (i < layers.size()) return follows(layers[i], key);
    const auto [model, layer] = measured[i - layers.size()];
    return models[model]->follows(layer, key);
  };
  tune::MachineFit fit = tune::fit_machine(request);
  const std::string from = fmt::format("fitted to {} recorded layers and {} of calibrations, H200, 2026-11-21 to 27",
                                       layers.size(), measured.size());
  for (const tune::FittedConstant& constant : fit.constants) {
    if (!constant.told) continue;
    fmt::print("{:28} {:10.4g} {:10.4g}\n", constant.constant.key, constant.base, constant.value);
    fit.machine.origin[constant.constant.key] = {sim::Source::kMeasured, from};
  }
  return fit.machine;
}

}  // namespace
}  // namespace uniep

int main(int argc, char** argv) {
  const std::vector<std::string> files(argv + 1, argv + argc);
  if (files.size() < 3) {
    fmt::print(stderr, "usage: refit_shipped MEASURED_LAYERS.json MACHINE.json CALIBRATION...\n");
    return 2;
  }
  std::ofstream(files[1]) << uniep::sim::machine_json(uniep::refitted(files[0], std::span(files).subspan(2)));
}
