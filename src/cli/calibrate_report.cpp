#include "cli/calibrate_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tune/median.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

double rounded(double value) {
  return std::stod(fmt::format("{:.6g}", value));
}

// (largest - smallest) / median of a layer's calls, but for the tenth that is farthest out on each side.
double spread_of(std::vector<double> calls) {
  std::sort(calls.begin(), calls.end());
  const std::size_t out = calls.size() / 10;
  return (calls[calls.size() - 1 - out] - calls[out]) / tune::median(calls);
}

Json errors_json(const CalibrateReport& report, bool held_out) {
  const CalibrateErrors errors = calibrate_errors(report.model, report.calibrated.fit, held_out);
  return {{"layers", errors.layers}, {"base", rounded(errors.base)}, {"calibrated", rounded(errors.calibrated)}};
}

std::string errors_line(const CalibrateReport& report, bool held_out) {
  const CalibrateErrors errors = calibrate_errors(report.model, report.calibrated.fit, held_out);
  if (errors.layers == 0) return "";
  return fmt::format("{:2} layers {}: {} is {:.1f} % off in the mean, the calibrated machine {:.1f} %\n", errors.layers,
                     held_out ? "held out" : "fitted", report.base, 100 * errors.base, 100 * errors.calibrated);
}

}  // namespace

CalibrateErrors calibrate_errors(const CalibrationModel& model, const tune::MachineFit& fit, bool held_out) {
  CalibrateErrors errors;
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    if (model.layers()[i].held_out != held_out) continue;
    const double measured = tune::median(model.layers()[i].milliseconds);
    errors.base += std::abs(fit.base_predicted[i] / measured - 1);
    errors.calibrated += std::abs(fit.predicted[i] / measured - 1);
    ++errors.layers;
  }
  if (errors.layers > 0) errors.base /= errors.layers, errors.calibrated /= errors.layers;
  return errors;
}

std::string calibrate_json(const CalibrateReport& report) {
  const tune::MachineFit& fit = report.calibrated.fit;
  Json json = {{"device", report.calibration.device},
               {"compute_units", report.calibration.compute_units},
               {"base", report.base},
               {"machine", report.out},
               {"seconds", rounded(report.seconds)},
               {"doubtful", report.calibrated.doubtful},
               {"error", {{"fitted", errors_json(report, false)}, {"held_out", errors_json(report, true)}}},
               {"constants", Json::array()},
               {"layers", Json::array()},
               {"dropped", report.calibration.dropped}};
  for (const std::string& line : report.model.dropped()) json["dropped"].push_back(line);
  for (const tune::FittedConstant& constant : fit.constants) {
    json["constants"].push_back({{"key", constant.constant.key},
                                 {"base", rounded(constant.base)},
                                 {"value", rounded(constant.value)},
                                 {"measured", constant.told},
                                 {"spread", rounded(constant.spread)}});
  }
  for (std::size_t i = 0; i < report.model.layers().size(); ++i) {
    const tune::CalibrationLayer& layer = report.model.layers()[i];
    json["layers"].push_back({{"layer", tune::name_of(layer)},
                              {"held_out", layer.held_out},
                              {"ms", rounded(tune::median(layer.milliseconds))},
                              {"spread", rounded(spread_of(layer.milliseconds))},
                              {"base_ms", rounded(fit.base_predicted[i])},
                              {"calibrated_ms", rounded(fit.predicted[i])}});
  }
  return json.dump(2) + "\n";
}

std::string calibrate_table(const CalibrateReport& report) {
  const tune::MachineFit& fit = report.calibrated.fit;
  std::string text = fmt::format("{:>9} {:>8} {:>8} {:>7}  layer of {}\n", "ms", report.base.substr(0, 8), "fitted",
                                 "spread", report.calibration.device);
  for (std::size_t i = 0; i < report.model.layers().size(); ++i) {
    const tune::CalibrationLayer& layer = report.model.layers()[i];
    const double ms = tune::median(layer.milliseconds);
    text += fmt::format("{:9.4f} {:+6.1f} % {:+6.1f} % {:5.1f} %  {}{}\n", ms, 100 * (fit.base_predicted[i] / ms - 1),
                        100 * (fit.predicted[i] / ms - 1), 100 * spread_of(layer.milliseconds), tune::name_of(layer),
                        layer.held_out ? " (held out)" : "");
  }
  text += fmt::format("\n{:<26} {:>12} {:>12} {:>8}\n", "constant", report.base.substr(0, 12), "measured", "spread");
  std::string kept;
  for (const tune::FittedConstant& constant : fit.constants) {
    const std::string& key = constant.constant.key;
    if (!constant.told) {
      kept += (kept.empty() ? "" : ", ") + key;
      continue;
    }
    text += fmt::format("{:<26} {:>12.5g} {:>12.5g} {:6.1f} %\n", key, constant.base, constant.value,
                        100 * constant.spread);
  }
  if (!kept.empty()) text += fmt::format("as in {}, since the layers say little about them: {}\n", report.base, kept);
  for (const std::string& line : report.calibration.dropped) text += "dropped: " + line + "\n";
  for (const std::string& line : report.model.dropped()) text += "dropped: " + line + "\n";
  text += "\n" + errors_line(report, false) + errors_line(report, true);
  if (!report.out.empty()) text += fmt::format("{:.0f} s; machine description: {}\n", report.seconds, report.out);
  return text;
}

}  // namespace uniep::cli
