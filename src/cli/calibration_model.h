#pragma once

#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "cli/timeline_model.h"
#include "tune/calibration.h"
#include "tune/machine_fit.h"

namespace uniep::cli {

// What the simulator says about a calibration's layers, one rank for all. Layers that took turns on warm GPUs had one
// power limit: it follows what tensor cores did in seconds, of all of them.
class CalibrationModel {
 public:
  // Layers that the library does not run (an older file's) get a line in dropped() and are left out of layers().
  CalibrationModel(const std::vector<tune::CalibrationLayer>& layers, const sim::MachineDescription& machine);

  const std::vector<tune::CalibrationLayer>& layers() const { return layers_; }
  const std::vector<std::string>& dropped() const { return dropped_; }
  // At the clock of the layers that took turns; one that was not measured yet as if it ran by itself.
  // `near_ghz`: as in sim::SimulateOptions.
  double milliseconds(std::size_t layer, const sim::MachineDescription& machine, double near_ghz = 0) const;
  // GHz of each, likewise.
  std::vector<double> clocks(const sim::MachineDescription& machine) const;
  // Of all layers, as they would be measured on a machine.
  std::vector<double> milliseconds_in_turn(const sim::MachineDescription& machine) const;
  bool follows(std::size_t layer, std::string_view key) const;
  // Of each layer the turn in which it was measured, from 0 on.
  const std::vector<std::size_t>& turns() const { return turn_of_; }
  // The fit of `base` to the measured times, and to timelines where there are some. `same_kind`: as in
  // tune::FitRequest.
  tune::MachineFit fit(const sim::MachineDescription& base, bool same_kind, int threads,
                       const TimelineModel* timelines) const;

 private:
  using Key = std::tuple<int64_t, int64_t, int, int64_t, int64_t, int64_t>;  // what a placement follows from
  // Layers that took turns. What they load the GPUs with is simulated on the machine that the model was made for.
  struct Turn {
    std::size_t begin = 0, end = 0;  // layers
    sim::Turns calls;                // none: not measured, or not on warm GPUs
  };
  void add(const tune::CalibrationLayer& layer);
  void find_turns();
  sim::Simulated simulated(std::size_t layer, const sim::MachineDescription& machine, double limit_ghz,
                           double near_ghz = 0) const;
  sim::Simulated in_turn(std::size_t layer, const sim::MachineDescription& machine, double near_ghz) const;

  sim::MachineDescription machine_;
  std::vector<tune::CalibrationLayer> layers_;
  std::vector<std::string> dropped_;
  std::vector<std::unique_ptr<Program>> programs_;
  std::vector<sim::ProgramCosts> costs_;  // of each, and it refers to them
  std::map<Key, std::shared_ptr<const internal::PlacementState>> placements_;
  std::vector<Turn> turns_;
  std::vector<std::size_t> turn_of_;  // by layer
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
  // Where thirds of the calls disagree on times by more than kMostSpread: constants whose spread is above it, too, else
  // kClocksOfTurns. So it is empty only where they agree.
  std::vector<std::string> doubtful;
};
inline constexpr double kMostSpread = 0.2;
inline constexpr const char* kClocksOfTurns = "clocks of the turns";
Calibrated calibrated_machine(const tune::Calibration& calibration, const CalibrationModel& model,
                              const sim::MachineDescription& base, int threads = 0,
                              const TimelineModel* timelines = nullptr);
// `base` with the compute units of the GPU.
sim::MachineDescription base_for(const sim::MachineDescription& base, const tune::Calibration& calibration);

}  // namespace uniep::cli
