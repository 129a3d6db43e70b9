#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "program/schedule_fields.h"
#include "sim/embedded_machines.h"
#include "sim/machine.h"
#include "uniep/error.h"

namespace uniep::sim {

std::vector<std::string> shipped_machine_names() {
  std::vector<std::string> names;
  for (const EmbeddedMachine& machine : embedded_machines()) names.emplace_back(machine.name);
  return names;
}

const MachineDescription& shipped_machine(std::string_view name) {
  static const std::vector<MachineDescription> machines = [] {
    std::vector<MachineDescription> all;
    for (const EmbeddedMachine& one : embedded_machines()) all.push_back(parse_machine(one.text, one.name));
    return all;
  }();
  const std::vector<std::string> names = shipped_machine_names();
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("machine: '{}'; must be one of {}, or a file", printable(name), fmt::join(names, ", ")));
  }
  return machines[static_cast<std::size_t>(at - names.begin())];
}

const MachineDescription* machine_of_device(std::string_view device) {
  const auto is = [&](std::string_view name) {
    const std::size_t at = device.find(name);  // GH200 is another machine
    return at != std::string_view::npos && (at == 0 || device[at - 1] != 'G');
  };
  if (is("H200")) return &shipped_machine("h200");
  if (is("H100")) return &shipped_machine("dgx_h100");
  return nullptr;
}

bool describes_kind(const MachineDescription& machine, std::string_view device, int compute_units) {
  if (machine.calibrated) return machine.calibrated->device == device;
  for (const char* const slower : {"PCIe", "NVL", "MIG"}) {
    if (device.find(slower) != std::string_view::npos) return false;
  }
  const MachineDescription* const shipped = machine_of_device(device);
  return shipped != nullptr && shipped->name == machine.name && shipped->class_of(Work::kFc1).count == compute_units;
}

}  // namespace uniep::sim
