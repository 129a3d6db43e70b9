#pragma once

#include <span>

#include "sim/machine.h"

// The one table of a description's numbers. Reading, writing, range checks and the documentation's list are driven by
// it; adding a number is adding a row, with the version that has it first and what files of earlier ones mean.
namespace uniep::sim {

struct NumberField {
  const char* section;
  const char* key;
  const char* unit;
  double least, most;
  bool whole;
  double& (*of)(MachineDescription&);
  const char* meaning;
  int since = 1;      // the first version of the format that has it
  double before = 0;  // its value in files of earlier ones
};

std::span<const NumberField> number_fields();

}  // namespace uniep::sim
