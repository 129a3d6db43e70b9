#include "sim/machine.h"

#include "fuzz_target.h"

using uniep::fuzz::accepts;
using uniep::fuzz::require;

// What is accepted is written and read as itself, and every number in it is finite where it is used.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  uniep::sim::MachineDescription machine;
  if (!accepts([&] { machine = uniep::sim::parse_machine(text, "fuzzed.json"); })) return 0;
  require(uniep::sim::parse_machine(machine_json(machine), "again.json") == machine,
          "a description is read as written");
  require(machine.tile_cycles(uniep::sim::Work::kFc1, 128, 256, 7168) > 0, "a tile takes time");
  return 0;
}
