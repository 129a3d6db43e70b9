#pragma once

#include <functional>

#include "cli/parser_forward.h"
#include "cli/rank_launcher.h"

namespace uniep::cli {

// `uniep tune`: measures which Schedules are fastest for a layer here, and keeps them for "auto". Sets `action` when
// the command line asks for it.
void add_tune_command(CLI::App& app, std::function<int()>& action, const Command& self);

}  // namespace uniep::cli
