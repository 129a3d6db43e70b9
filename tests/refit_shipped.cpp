#include <fmt/format.h>

#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cli/calibration_model.h"
#include "cli/timeline_model.h"
#include "io/file.h"
#include "support/measured_layers.h"
#include "support/measured_points.h"
#include "tune/machine_fit.h"

// Fits a shipped description anew, from itself, to what was recorded of layers on such GPUs (but what
// simulate_error_test holds out), to what `uniep calibrate --raw` wrote, to what bench/measure_points.py did (.jsonl)
// and to timelines (.trace.json), of which the last one is held out:
//   refit_shipped tests/data/measured_layers.json machines/h200.json FILE...
namespace uniep {
namespace {

using sim::MachineDescription;

std::vector<tune::CalibrationLayer> layers_of(const std::string& file) {
  if (file.ends_with(".jsonl")) return test::read_measured_points(file);
  return tune::parse_calibration(io::read_text_file(file), file).layers;
}

MachineDescription refitted(const MachineDescription& base, const std::string& recorded,
                            std::span<const std::string> files) {
  std::vector<test::MeasuredLayer> layers;
  for (test::MeasuredLayer& layer : test::read_measured_layers(recorded)) {
    if (layer.machine == base.name && !layer.held_out) layers.push_back(std::move(layer));
  }
  std::vector<std::unique_ptr<cli::CalibrationModel>> models;
  std::vector<std::pair<std::size_t, std::size_t>> measured;  // a model, a layer
  tune::FitRequest request;
  std::map<std::string, std::size_t> sessions;
  for (const test::MeasuredLayer& layer : layers) {
    request.milliseconds.push_back({layer.ms});
    request.turns.push_back(sessions.try_emplace(layer.session, sessions.size()).first->second);
  }
  std::size_t turns = sessions.size();
  std::vector<std::string> timelines;
  for (const std::string& file : files) {
    if (file.ends_with(".trace.json")) {
      timelines.push_back(file);
      continue;
    }
    models.push_back(std::make_unique<cli::CalibrationModel>(layers_of(file), base));
    for (std::size_t i = 0; i < models.back()->layers().size(); ++i) {
      if (models.back()->layers()[i].held_out) continue;
      measured.emplace_back(models.size() - 1, i);
      request.milliseconds.push_back(models.back()->layers()[i].milliseconds);
      request.turns.push_back(turns + models.back()->turns()[i]);
    }
    turns += models.back()->layers().size();
  }
  fmt::print("{} recorded layers, {} of FILEs, {} timelines\n", layers.size(), measured.size(), timelines.size());
  request.held_out.assign(request.milliseconds.size(), 0);
  std::optional<cli::TimelineModel> timeline_model;
  if (!timelines.empty()) timeline_model.emplace(cli::read_timelines(timelines), base);
  if (timeline_model) timeline_model->add_to(request);
  test::LayerPredictor predictor;
  request.base = &base;
  request.ranks = 2;
  request.layer_error = tune::kOtherRunError;
  predictor.add_to(request, layers);
  std::vector<std::vector<double>> clocks;  // on the base
  for (const auto& model : models) clocks.push_back(model->clocks(base));
  request.predict = [&, recorded = request.predict](std::size_t i, const MachineDescription& machine) {
    if (i < layers.size()) return recorded(i, machine);
    const auto [model, layer] = measured[i - layers.size()];
    const sim::State state = models[model]->layers()[layer].state;
    return models[model]->milliseconds(layer, machine, clocks[model][layer] * sim::clock_scale(machine, base, state));
  };
  request.follows = [&, recorded = request.follows](std::size_t i, std::string_view key) {
    if (i < layers.size()) return recorded(i, key);
    if (i >= layers.size() + measured.size()) return timeline_model->follows(i - layers.size() - measured.size(), key);
    const auto [model, layer] = measured[i - layers.size()];
    return models[model]->follows(layer, key);
  };
  tune::MachineFit fit = tune::fit_machine(request);
  const std::string from =
      fmt::format("fitted to {} recorded layers, {} of calibrations and searches and {} timelines, 2026-11-21 to 30",
                  layers.size(), measured.size(), timelines.size());
  for (const tune::FittedConstant& constant : fit.constants) {
    if (!constant.told) continue;
    const std::string& key = constant.constant.key;
    fmt::print("{:28} {:10.4g} {:10.4g}\n", key, constant.base, constant.value);
    tune::constant_of(fit.machine, key) = std::stod(fmt::format("{:.4g}", constant.value));
    fit.machine.origin[key] = {sim::Source::kMeasured, from};
    // It moves with the clock that falls to it.
    if (key == "clock.pause") fit.machine.origin["clock.pause_lowest"] = fit.machine.origin[key];
  }
  return fit.machine;
}

}  // namespace
}  // namespace uniep

int main(int argc, char** argv) {
  const std::vector<std::string> files(argv + 1, argv + argc);
  if (files.size() < 3) {
    fmt::print(stderr, "usage: refit_shipped MEASURED_LAYERS.json MACHINE.json FILE...\n");
    return 2;
  }
  const auto base = uniep::sim::parse_machine(uniep::io::read_text_file(files[1]), files[1]);
  const std::string fitted = uniep::sim::machine_json(uniep::refitted(base, files[0], std::span(files).subspan(2)));
  std::ofstream(files[1]) << fitted;
}
