#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace uniep::cli {

// uniep simulate: how long a Schedule takes on a machine, without running it.
void add_simulate_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
