#pragma once

#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "cli/timeline_model.h"
#include "tune/calibration.h"
#include "tune/machine_fit.h"

namespace uniep::cli {

// What the simulator says about a calibration's layers, one rank for all.
class CalibrationModel {
 public:
  // Layers that the library does not run (an older file's) get a line in dropped() and are left out of layers().
  CalibrationModel(const std::vector<tune::CalibrationLayer>& layers, const sim::MachineDescription& machine);

  const std::vector<tune::CalibrationLayer>& layers() const { return layers_; }
  const std::vector<std::string>& dropped() const { return dropped_; }
  double milliseconds(std::size_t layer, const sim::MachineDescription& machine) const;
  bool follows(std::size_t layer, std::string_view key) const;
  // The fit of `base` to the measured times, and to timelines where there are some.
  tune::MachineFit fit(const sim::MachineDescription& base, int threads = 0,
                       const TimelineModel* timelines = nullptr) const;

 private:
  using Key = std::tuple<int64_t, int64_t, int, int64_t, int64_t, int64_t>;  // what a placement follows from
  void add(const tune::CalibrationLayer& layer);

  sim::MachineDescription machine_;
  std::vector<tune::CalibrationLayer> layers_;
  std::vector<std::string> dropped_;
  std::vector<std::unique_ptr<Program>> programs_;
  std::map<Key, std::shared_ptr<const internal::PlacementState>> placements_;
};

// The Schedule that a layer has on GPUs of so many compute units.
Schedule calibration_schedule(const tune::CalibrationLayer& layer, const Machine& machine);

// Whether a call's time on the machine can follow from a constant.
bool follows_constant(const Program& program, sim::State state, const sim::MachineDescription& machine,
                      std::string_view key);

// The description that a calibration gives: each number measured, or taken over from the base, and said so.
struct Calibrated {
  sim::MachineDescription machine;
  tune::MachineFit fit;
  // Where thirds of the calls disagree on times by more than kMostSpread: constants whose spread is above it, too.
  std::vector<std::string> doubtful;
};
inline constexpr double kMostSpread = 0.2;
Calibrated calibrated_machine(const tune::Calibration& calibration, const CalibrationModel& model,
                              const sim::MachineDescription& base, int threads = 0,
                              const TimelineModel* timelines = nullptr);
// `base` with the compute units of the GPU.
sim::MachineDescription base_for(const sim::MachineDescription& base, const tune::Calibration& calibration);

}  // namespace uniep::cli
