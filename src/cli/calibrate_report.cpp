#include "cli/calibrate_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/report_words.h"
#include "io/json_text.h"
#include "tune/median.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

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

Json errors_json(const TimelineErrors& errors) {
  return {{"calls", errors.calls},
          {"end", {{"base", rounded(errors.base_end)}, {"calibrated", rounded(errors.calibrated_end)}}},
          {"numbers", {{"base", rounded(errors.base_numbers)}, {"calibrated", rounded(errors.calibrated_numbers)}}}};
}

const char* state_name(sim::State state) {
  return state == sim::State::kPaused ? "paused" : "sustained";
}

void add_timelines(Json& json, const CalibrateReport& report) {
  const TimelineModel& timelines = *report.timelines;
  const tune::MachineFit& fit = report.calibrated.fit;
  json["timeline_error"] = {{"fitted", errors_json(timeline_errors(timelines, fit, false))},
                            {"held_out", errors_json(timeline_errors(timelines, fit, true))}};
  json["timelines"] = Json::array();
  for (std::size_t i = 0; i < timelines.calls().size(); ++i) {
    const TimelineCall& call = timelines.calls()[i];
    Json numbers = Json::object();
    for (std::size_t j = 0; j < timelines.measured(i).numbers.size(); ++j) {
      const TimelineNumber& number = timelines.measured(i).numbers[j];
      numbers[number.name] = {{"us", rounded(number.us)},
                              {"error", rounded(number.error)},
                              {"base_us", rounded(fit.base_timelines[i][j])},
                              {"calibrated_us", rounded(fit.timelines[i][j])}};
    }
    json["timelines"].push_back({{"timeline", name_of(call)},
                                 {"held_out", call.held_out},
                                 {"state", state_name(timelines.state(i))},
                                 {"numbers", std::move(numbers)}});
  }
}

std::string timelines_table(const CalibrateReport& report) {
  const TimelineModel& timelines = *report.timelines;
  const tune::MachineFit& fit = report.calibrated.fit;
  std::string text;
  for (std::size_t i = 0; i < timelines.calls().size(); ++i) {
    const TimelineCall& call = timelines.calls()[i];
    text += fmt::format("{:>9} {:>8} {:>8}  timeline: {}, {}{}\n", "us", report.base.substr(0, 8), "fitted",
                        name_of(call), state_name(timelines.state(i)), call.held_out ? " (held out)" : "");
    for (std::size_t j = 0; j < timelines.measured(i).numbers.size(); ++j) {
      const TimelineNumber& number = timelines.measured(i).numbers[j];
      text += fmt::format("{:9.4g} {:+6.1f} % {:+6.1f} %  {}\n", number.us,
                          100 * (fit.base_timelines[i][j] / number.us - 1), 100 * (fit.timelines[i][j] / number.us - 1),
                          number.name);
    }
  }
  return text;
}

std::string errors_line(const CalibrateReport& report, const TimelineErrors& errors, const char* which) {
  if (errors.calls == 0) return "";
  return fmt::format(
      "{:2} timeline{} {}: {} is {:.1f} % off their ends in the mean, the calibrated machine {:.1f} %; off all their "
      "numbers {:.1f} % and {:.1f} %\n",
      errors.calls, errors.calls == 1 ? "" : "s", which, report.base, 100 * errors.base_end,
      100 * errors.calibrated_end, 100 * errors.base_numbers, 100 * errors.calibrated_numbers);
}

}  // namespace

TimelineErrors timeline_errors(const TimelineModel& timelines, const tune::MachineFit& fit, bool held_out) {
  TimelineErrors errors;
  int numbers = 0;
  for (std::size_t i = 0; i < timelines.calls().size(); ++i) {
    if (timelines.calls()[i].held_out != held_out) continue;
    ++errors.calls;
    for (std::size_t j = 0; j < timelines.measured(i).numbers.size(); ++j) {
      const double us = timelines.measured(i).numbers[j].us;
      const double base = std::abs(fit.base_timelines[i][j] / us - 1),
                   calibrated = std::abs(fit.timelines[i][j] / us - 1);
      ++numbers;
      errors.base_numbers += base, errors.calibrated_numbers += calibrated;
      if (j == 0) errors.base_end += base, errors.calibrated_end += calibrated;
    }
  }
  if (errors.calls == 0) return errors;
  errors.base_end /= errors.calls, errors.calibrated_end /= errors.calls;
  errors.base_numbers /= numbers, errors.calibrated_numbers /= numbers;
  return errors;
}

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
  const bool known = fit.has_thirds || report.timelines == nullptr;
  for (const tune::FittedConstant& constant : fit.constants) {
    json["constants"].push_back({{"key", constant.constant.key},
                                 {"base", rounded(constant.base)},
                                 {"value", rounded(constant.value)},
                                 {"measured", constant.told},
                                 {"spread", known ? Json(rounded(constant.spread)) : Json()}});
  }
  for (std::size_t i = 0; i < report.model.layers().size(); ++i) {
    const tune::CalibrationLayer& layer = report.model.layers()[i];
    json["layers"].push_back({{"layer", tune::layer_name(layer)},
                              {"held_out", layer.held_out},
                              {"ms", rounded(tune::median(layer.milliseconds))},
                              {"spread", rounded(spread_of(layer.milliseconds))},
                              {"base_ms", rounded(fit.base_predicted[i])},
                              {"calibrated_ms", rounded(fit.predicted[i])}});
  }
  if (report.timelines != nullptr) add_timelines(json, report);
  return io::json_text(json, 2) + "\n";
}

std::string calibrate_table(const CalibrateReport& report) {
  const tune::MachineFit& fit = report.calibrated.fit;
  std::string text;
  if (!report.model.layers().empty() || report.timelines == nullptr) {
    text = fmt::format("{:>9} {:>8} {:>8} {:>7}  layer of {}\n", "ms", report.base.substr(0, 8), "fitted", "spread",
                       report.calibration.device);
  }
  for (std::size_t i = 0; i < report.model.layers().size(); ++i) {
    const tune::CalibrationLayer& layer = report.model.layers()[i];
    const double ms = tune::median(layer.milliseconds);
    text += fmt::format("{:9.4f} {:+6.1f} % {:+6.1f} % {:5.1f} %  {}{}\n", ms, 100 * (fit.base_predicted[i] / ms - 1),
                        100 * (fit.predicted[i] / ms - 1), 100 * spread_of(layer.milliseconds), tune::layer_name(layer),
                        layer.held_out ? " (held out)" : "");
  }
  if (report.timelines != nullptr) text += timelines_table(report);
  text += fmt::format("\n{:<26} {:>12} {:>12} {:>8}\n", "constant", report.base.substr(0, 12), "measured", "spread");
  std::string kept;
  for (const tune::FittedConstant& constant : fit.constants) {
    const std::string& key = constant.constant.key;
    if (!constant.told) {
      kept += (kept.empty() ? "" : ", ") + key;
      continue;
    }
    const std::string spread = fit.has_thirds ? fmt::format("{:6.1f} %", 100 * constant.spread) : "       -";
    text += fmt::format("{:<26} {:>12.5g} {:>12.5g} {}\n", key, constant.base, constant.value, spread);
  }
  const char* const told = report.timelines == nullptr ? "the layers say" : "what was measured says";
  if (!kept.empty()) text += fmt::format("as in {}, since {} little about them: {}\n", report.base, told, kept);
  for (const std::string& line : report.calibration.dropped) text += "dropped: " + line + "\n";
  for (const std::string& line : report.model.dropped()) text += "dropped: " + line + "\n";
  text += "\n" + errors_line(report, false) + errors_line(report, true);
  if (report.timelines != nullptr) {
    text += errors_line(report, timeline_errors(*report.timelines, fit, false), "fitted");
    text += errors_line(report, timeline_errors(*report.timelines, fit, true), "held out");
  }
  if (!report.out.empty()) text += fmt::format("{:.0f} s; machine description: {}\n", report.seconds, report.out);
  return text;
}

}  // namespace uniep::cli
