#pragma once

#include <string>

#include "cli/parser_forward.h"
#include "sim/machine.h"

namespace uniep::cli {

// --machine NAME|FILE into `name`, which has the default, unless that is said in words.
void add_machine_option(CLI::App& app, std::string& name, const std::string& by_default = "");

// A machine that is in the library, or the description in a file. Throws Error that names the option.
sim::MachineDescription load_machine(const std::string& name, const std::string& option = "--machine");

}  // namespace uniep::cli
