#include "cli/launch_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <set>

#include "cli/options.h"
#include "comm/bootstrap.h"

namespace uniep::cli {
namespace {

// One process for each rank, on this machine.
void launch_processes(const LaunchOptions& options, const std::string& name, const std::vector<int>& devices,
                      int ranks) {
  if (options.self.program.empty()) {
    throw Error(Status::kUnsupported,
                "--launch: processes: RANK and WORLD_SIZE are not set, and this program can not start itself; must run "
                "under torchrun, or be threads");
  }
  const std::set<int> different(devices.begin(), devices.end());
  if (!different.empty() && (different.size() != devices.size() || static_cast<int>(different.size()) < ranks)) {
    throw Error(Status::kInvalidArgument,
                fmt::format("--devices: {}; must be {} different GPUs, one for each of the processes",
                            fmt::join(devices, ","), ranks));
  }
  launch_ranks(options.self, name, ranks);
}

}  // namespace

void add_launch_option(CLI::App& app, LaunchOptions& options) {
  add_word_option<Launch>(
      app, "--launch", options.launch, {{"threads", Launch::kThreads}, {"processes", Launch::kProcesses}},
      "all ranks in this process, or a process a GPU: torchrun's, or started here (default threads)");
}

bool launched_ranks(const LaunchOptions& options, const std::string& name, const std::vector<int>& devices,
                    LayerOptions& layer) {
  if (options.launch == Launch::kThreads) return false;
  if (layer.engine == EngineKind::kCpu) {
    throw Error(Status::kUnsupported,
                "--launch: processes needs the cuda engine; with --engine cpu, whose ranks are in one process, it must "
                "be threads");
  }
  const std::optional<RankEnvironment> environment = rank_environment();
  if (!environment) {
    launch_processes(options, name, devices, layer.ranks);
    return true;
  }
  if (!options.ranks_given) layer.ranks = environment->ranks;
  if (layer.ranks != environment->ranks) {
    throw Error(Status::kInvalidArgument,
                fmt::format("--ranks: {}; must be the environment's WORLD_SIZE, {}", layer.ranks, environment->ranks));
  }
  return false;
}

Group make_group(const LayerOptions& layer, const std::vector<int>& devices, Launch launch) {
  GroupOptions options;
  options.engine = layer.engine;
  options.ranks = layer.ranks;
  options.workers = layer.workers;
  options.devices = devices;
  options.launch = launch;
  Group group(options);
  if (group.engine() == EngineKind::kCpu && !devices.empty()) {
    throw Error(
        Status::kInvalidArgument,
        fmt::format("--devices: {} names GPUs, and the engine is cpu; must be left out", fmt::join(devices, ",")));
  }
  return group;
}

}  // namespace uniep::cli
