#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// `uniep info`: the version, the engines of this machine, and what a layer needs. Sets `action` when the command line
// asks for it.
void add_info_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
