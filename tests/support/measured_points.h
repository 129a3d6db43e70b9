#pragma once

#include <string>
#include <vector>

#include "tune/calibration.h"

// Times of Schedules that nobody chose, as bench/measure_points.py wrote them, as layers that a machine is fitted to.
namespace uniep::test {

// Sets with uniform routing and at most 8192 tokens, which one rank stands for. Held out: a third of the Schedules, by
// name, in all sets; all of H 7168; what takes more than 2.2 times as long as the default. bench/simulator_errors.py
// --held-out takes the same Schedules and the same shape.
std::vector<tune::CalibrationLayer> read_measured_points(const std::string& path);

}  // namespace uniep::test
