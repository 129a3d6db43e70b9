#pragma once

#include <functional>

#include "cli/parser_forward.h"

namespace uniep::cli {

// `uniep train`. When the command is given, parsing sets `action` to what runs it: 0, or 1 when a run of --compare
// differs; everything else is thrown.
void add_train_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
