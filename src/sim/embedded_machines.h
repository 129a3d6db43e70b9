#pragma once

#include <vector>

namespace uniep::sim {

// A file of machines/, as text; written at build time.
struct EmbeddedMachine {
  const char* name;
  const char* text;
};

const std::vector<EmbeddedMachine>& embedded_machines();

}  // namespace uniep::sim
