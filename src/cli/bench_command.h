#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace uniep::cli {

// `uniep bench`: measures one operation on GPUs. Sets `action` when the command line asks for it.
void add_bench_command(CLI::App& app, std::function<int()>& action);

}  // namespace uniep::cli
