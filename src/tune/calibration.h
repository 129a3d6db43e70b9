#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sim/simulate.h"

// What `uniep calibrate` measures, and the file in which it keeps it: JSON {"format": "uniep calibration", ...}.
namespace uniep::tune {

// One layer under one Schedule, with uniform routing.
struct CalibrationLayer {
  LayerShape shape;
  int ranks = 1;
  int64_t tokens = 0;  // of each rank
  Direction direction = Direction::kForward;
  sim::State state = sim::State::kSustained;
  std::string schedule;              // the fields that are given
  bool held_out = false;             // shows the error of the fit, which it is no part of
  std::vector<double> milliseconds;  // of its calls, in the order in which they ran; empty: not measured yet
  bool operator==(const CalibrationLayer&) const = default;
};
// "4096,1536,16,8 x 1, T 4096, forward, sustained: queue=static"
std::string layer_name(const CalibrationLayer& layer);

bool share_tensors(const CalibrationLayer& a, const CalibrationLayer& b);
// Whether layers that follow each other are called in turn, on the same tensors.
bool take_turns(const CalibrationLayer& a, const CalibrationLayer& b);

// The fixed set: those of one GPU and, with two ranks, those of two, too. Layers that share tensors follow each other.
// Few kernels make all of them.
std::vector<CalibrationLayer> calibration_layers(int ranks);

struct Calibration {
  std::string device;     // the GPU's name
  int compute_units = 0;  // of it
  std::vector<CalibrationLayer> layers;
  std::vector<std::string> dropped;  // layers that could not be measured, and why
  bool operator==(const Calibration&) const = default;
};
std::string to_json(const Calibration& calibration);
// `file` stands in messages. Throws Error(kInvalidArgument), one line: file, key, value and what is legal.
inline constexpr std::size_t kMaxCalibrationText = std::size_t{1} << 22;
Calibration parse_calibration(std::string_view text, const std::string& file);

}  // namespace uniep::tune
