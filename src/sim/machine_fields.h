#pragma once

#include <span>

#include "sim/machine.h"

// The one table of a description's numbers. Reading, writing, range checks and the documentation's list are driven by
// it; adding a number is adding a row (and a version, since a missing key is refused).
namespace uniep::sim {

struct NumberField {
  const char* section;
  const char* key;
  const char* unit;
  double least, most;
  bool whole;
  double& (*of)(MachineDescription&);
  const char* meaning;
};

std::span<const NumberField> number_fields();

}  // namespace uniep::sim
