#pragma once

#include "cli/parser_forward.h"

namespace uniep::cli {

// Throws Error(kInvalidArgument) where a path that `command` was given is empty, or where one that it writes is another
// of its paths: the later would replace the earlier. `train --resume F --checkpoint F` alone is meant so.
void check_paths(const CLI::App& command);

}  // namespace uniep::cli
