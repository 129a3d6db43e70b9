#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// uniep simulate: how long a Schedule takes on a machine, without running it.
void add_simulate_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
