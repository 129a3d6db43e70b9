#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/timeline_numbers.h"
#include "cli/traced_run.h"
#include "tune/machine_fit.h"

// Timelines of files as `uniep calibrate --traces` fits a machine description to them.
namespace uniep::cli {

// One call of a file.
struct TimelineCall {
  std::string file;
  TracedRun run;
  Timeline timeline;
  bool held_out = false;  // shows the error of the fit, which it is no part of
};
// Those of all files, all of one kind of GPU; of three files or more the last one is held out. Throws Error that names
// the file: kInvalidArgument for what is no such timeline, kIo for what can not be read.
std::vector<TimelineCall> read_timelines(const std::vector<std::string>& files);
// "forward of a.trace"
std::string name_of(const TimelineCall& call);

// What the simulator says about them.
class TimelineModel {
 public:
  // `machine`: with the GPU's compute units. Throws Error(kInvalidArgument) that names the file for a timeline whose
  // tiles are not those of the layer that it names. Calls whose clocks nobody knows get the states in which
  // the tiles of all calls are as near to those of one machine as can be.
  TimelineModel(std::vector<TimelineCall> calls, const sim::MachineDescription& machine);

  const std::vector<TimelineCall>& calls() const { return calls_; }
  const TimelineNumbers& measured(std::size_t call) const { return measured_[call]; }
  sim::State state(std::size_t call) const { return *calls_[call].run.state; }
  // Microseconds, as many as measured() has, in its order.
  std::vector<double> predicted(std::size_t call, const sim::MachineDescription& machine) const;
  bool follows(std::size_t call, std::string_view key) const;
  // Behind the layers that are there; has to outlive the request.
  void add_to(tune::FitRequest& request) const;

 private:
  void add(TimelineCall& call);
  TimelineNumbers simulated(std::size_t call, sim::State state, const sim::MachineDescription& machine) const;
  double tiles_off(std::size_t call, sim::State state) const;
  void find_states();

  sim::MachineDescription machine_;
  std::vector<TimelineCall> calls_;
  std::vector<std::unique_ptr<program::Program>> programs_;
  std::vector<TimelineNumbers> measured_;
};

}  // namespace uniep::cli
