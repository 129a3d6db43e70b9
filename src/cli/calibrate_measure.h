#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tune/calibration.h"

namespace uniep::cli {

struct MeasureRequest {
  std::vector<int> devices;  // a rank each
  double seconds = 40;       // of calls, warm-up with them; a third of them counts
  double longest = 60;       // seconds, compiling apart: what has not begun by then is dropped
  std::function<void(const std::string& line)> progress;
  std::function<void(const tune::Calibration& so_far)> keep;  // after each group of layers: what ends early is not lost
};

// Times layers on the GPUs. Those that fail are dropped, with a line, and the rest goes on. Throws Error where nothing
// can be measured.
tune::Calibration measure_layers(const std::vector<tune::CalibrationLayer>& layers, const MeasureRequest& request);

// Compiles what they launch, several kernels at once, into the process's cache; needs no GPU. How many kernels.
int compile_layers(const std::vector<tune::CalibrationLayer>& layers, int workers);

}  // namespace uniep::cli
