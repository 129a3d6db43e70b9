#pragma once

#include <string>
#include <vector>

#include "cli/layer_options.h"
#include "cli/parser_forward.h"
#include "cli/rank_launcher.h"

namespace uniep::cli {

// Where the ranks of a command are.
struct LaunchOptions {
  Launch launch = Launch::kThreads;
  bool ranks_given = false;
  Command self;  // this very command
};

// --launch.
void add_launch_option(CLI::App& app, LaunchOptions& options);

// With --launch processes: true where this process has started one for each rank, and they have ended well. Else this
// process has the ranks that `layer` says, of which there are as many as the environment says. `name` is the command's,
// as it begins its messages. Throws Error(kInvalidArgument, kUnsupported, or launch_ranks()'s).
bool launched_ranks(const LaunchOptions& options, const std::string& name, const std::vector<int>& devices,
                    LayerOptions& layer);

// The group that a command's ranks are. Throws Error(kInvalidArgument) for GPUs where the engine is the cpu.
Group make_group(const LayerOptions& layer, const std::vector<int>& devices, Launch launch);

}  // namespace uniep::cli
