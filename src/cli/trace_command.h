#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// `uniep trace FILE --svg OUT`. Sets `action` when the command line asks for it.
void add_trace_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
