#pragma once

#include "sim/machine.h"
#include "tune/load.h"
#include "uniep/layer.h"
#include "uniep/schedule.h"

namespace uniep::tune {

// How long a call of a layer takes in proportion to others, by what routing makes of it: on cuda the closed form of the
// forward layer, on a machine about like the one that it runs on; on cpu, where ranks share the cores, all rows. A
// number for calls whose rows nobody knows. Only ratios of forecasts mean anything.
class Forecast {
 public:
  Forecast(const LayerConfig& config, const Machine& machine, const Schedule& schedule, int64_t tokens);
  double of(double busiest_rows, double mean_rows) const;

 private:
  LayerConfig config_;
  Machine machine_;
  Schedule schedule_;
  const sim::MachineDescription* description_ = nullptr;
  RankLoad load_;  // of uniform routing
};

}  // namespace uniep::tune
