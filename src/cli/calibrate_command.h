#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// `uniep calibrate`: measures the GPUs of this machine, and writes a machine description.
void add_calibrate_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
