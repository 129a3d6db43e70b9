#pragma once

#include <functional>

#include "cli/parser_forward.h"
#include "cli/rank_launcher.h"

namespace uniep::cli {

// `uniep run`: one layer, forward and backward, on any engine. Sets `action` when the command line asks for it. `self`
// is what started this program, or has no program.
void add_run_command(CLI::App& app, std::function<int()>& action, const Command& self);

}  // namespace uniep::cli
