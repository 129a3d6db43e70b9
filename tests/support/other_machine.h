#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

#include "sim/machine.h"
#include "tune/machine_fit.h"

namespace uniep::test {

// Another GPU of the kind: all constants off by up to what machines differ by, and a lower clock.
inline sim::MachineDescription other_machine(const sim::MachineDescription& base, int ranks, uint64_t seed) {
  sim::MachineDescription machine = base;
  std::mt19937_64 random(seed);
  for (const tune::FitConstant& constant : tune::fit_constants(base, ranks)) {
    const double by = (static_cast<double>(random() >> 11) * 0x1p-53 * 2 - 1) * constant.spread;
    double& value = tune::constant_of(machine, constant.key);
    value = std::clamp(constant.share ? value + by : value * std::exp(by), constant.least, constant.most);
  }
  machine.clock.limit = base.clock.limit * 0.92;
  machine.clock.pause_lowest = std::min(machine.clock.pause_lowest, machine.clock.pause);
  return machine;
}

}  // namespace uniep::test
