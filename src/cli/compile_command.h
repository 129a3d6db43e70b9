#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// `uniep compile`: a layer's kernels, before the job that calls it. Sets `action` when the command line asks for it.
void add_compile_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
