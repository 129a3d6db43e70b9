#pragma once

#include <string>

#include "cli/calibration_model.h"

namespace uniep::cli {

// What `uniep calibrate` reports of its result; `out`: the file that it wrote.
struct CalibrateReport {
  const tune::Calibration& calibration;
  const CalibrationModel& model;
  const Calibrated& calibrated;
  std::string base, out;
  double seconds = 0;
  const TimelineModel* timelines = nullptr;
};
std::string calibrate_json(const CalibrateReport& report);
std::string calibrate_table(const CalibrateReport& report);

// Mean of |predicted / measured - 1| over the layers that were fitted or held out; 0 where there are none.
struct CalibrateErrors {
  int layers = 0;
  double base = 0, calibrated = 0;
};
CalibrateErrors calibrate_errors(const CalibrationModel& model, const tune::MachineFit& fit, bool held_out);

// The same of timelines: of how long each call took, and of all their numbers.
struct TimelineErrors {
  int calls = 0;
  double base_end = 0, calibrated_end = 0, base_numbers = 0, calibrated_numbers = 0;
};
TimelineErrors timeline_errors(const TimelineModel& timelines, const tune::MachineFit& fit, bool held_out);

}  // namespace uniep::cli
