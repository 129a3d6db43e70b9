#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// `uniep schedule`: fills, counts, samples and proves schedules. Sets `action` when the command line asks for it.
void add_schedule_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
