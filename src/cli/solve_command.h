#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// `uniep solve`: the best Schedule of a layer on a machine without measuring.
void add_solve_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
