#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace uniep::cli {

// `uniep run`: one layer, forward and backward, on any engine. Sets `action` when the command line asks for it.
void add_run_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
