#pragma once

#include <functional>

#include "cli/parser_forward.h"
#include "cli/rank_launcher.h"

namespace uniep::cli {

// `uniep bench`: measures one operation on GPUs. Sets `action` when the command line asks for it. `self` starts this
// very command again, for --launch processes.
void add_bench_command(CLI::App& app, std::function<int()>& action, const Command& self);

}  // namespace uniep::cli
