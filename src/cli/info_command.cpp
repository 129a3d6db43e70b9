#include "cli/info_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "cli/layer_options.h"
#include "cli/output_file.h"
#include "engine/cpu/kernels.h"
#include "engine/cuda/calls/engine.h"
#include "engine/cuda/device/arguments/signals.h"
#include "uniep/version.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InfoOptions {
  LayerOptions layer;
  std::string json;
};

Json engines() {
  Json json;
  json["cpu"] = {{"available", true},
                 {"instruction_set", cpu::instruction_set_name(cpu::best_instruction_set())},
                 {"cores", std::thread::hardware_concurrency()}};
  GroupOptions cuda;
  cuda.engine = EngineKind::kCuda;
  try {
    const Group group(cuda);
    json["cuda"] = {{"available", true}, {"workers", group.workers()}};
  } catch (const Error& error) {
    json["cuda"] = {{"available", false}, {"reason", error.what()}};
  }
  return json;
}

// Whose memory is asked for: a group of this machine, or GPUs that are elsewhere, each with a process of its own.
class Target {
 public:
  explicit Target(const LayerOptions& layer) {
    const bool absent = layer.engine == EngineKind::kCuda && !cuda::has_hopper_gpu();
    if (absent) {
      machine_ = absent_gpu(layer);
      machine_.processes = true;
      return;
    }
    GroupOptions options;
    options.engine = layer.engine;
    options.ranks = layer.ranks;
    options.workers = layer.workers;
    group_.emplace(options);
    machine_ = group_->machine();
  }

  bool is_elsewhere() const { return !group_; }
  const Machine& machine() const { return machine_; }
  std::vector<MemoryNeed> needs(const LayerConfig& config, const Schedule& schedule, const Placement& placement,
                                Direction direction) const {
    const MemoryOptions options{.direction = direction};
    return group_ ? memory_need(*group_, config, schedule, placement, options)
                  : cuda::memory_need(machine_, config, schedule, placement, options);
  }

 private:
  std::optional<Group> group_;
  Machine machine_;
};

Json memory_of(const Target& target, const LayerOptions& layer, const Placement& placement, Direction direction) {
  Json ranks = Json::array();
  const Schedule schedule = layer.resolved(direction, target.machine());
  for (const MemoryNeed& need : target.needs(layer.config(), schedule, placement, direction)) {
    ranks.push_back({{"saved_bytes", need.saved_bytes},
                     {"workspace_bytes", need.workspace_bytes},
                     {"symmetric_bytes", need.symmetric_bytes}});
  }
  return ranks;
}

// Of the rank that saves most, for each way to save, with all else as the layer's Schedules say.
Json save_modes(const Target& target, const LayerOptions& layer, const Placement& placement) {
  Json modes = Json::array();
  for (const char* z : {"keep", "recompute"}) {
    for (const char* xg : {"keep", "redispatch"}) {
      std::size_t saved = 0, workspace = 0;
      double of_token = 0;
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        PartialSchedule given = layer.given(direction);
        given.set("save.xg", xg);
        given.set("save.z", z);
        const Schedule schedule = resolve(
            given,
            {.direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = target.machine()});
        const std::vector<MemoryNeed> needs = target.needs(layer.config(), schedule, placement, direction);
        for (std::size_t rank = 0; rank < needs.size(); ++rank) {
          workspace = std::max(workspace, needs[rank].workspace_bytes);
          if (direction == Direction::kBackward || needs[rank].saved_bytes < saved) continue;
          saved = needs[rank].saved_bytes;
          const auto tokens = static_cast<double>(placement.tokens(static_cast<int>(rank)));
          of_token = tokens > 0 ? static_cast<double>(saved) / tokens : 0;
        }
      }
      modes.push_back({{"save.xg", xg},
                       {"save.z", z},
                       {"saved_bytes", saved},
                       {"saved_bytes_per_token", of_token},
                       {"workspace_bytes", workspace}});
    }
  }
  return modes;
}

// Where no engine was named and there is no GPU the forecast is the cpu engine's. It would mislead whoever has GPUs
// elsewhere if they refused the layer.
void require_for_gpus(const LayerOptions& layer) {
  const auto refuse = [](const std::string& why) {
    throw Error(Status::kInvalidArgument, why + "; --engine cpu tells what the cpu engine needs");
  };
  if (layer.ranks > cuda::kMaxCudaRanks) {
    refuse(fmt::format("--ranks: {}; GPUs run 1 to {}", layer.ranks, cuda::kMaxCudaRanks));
  }
  try {
    layer.resolved(Direction::kForward, absent_gpu(layer));
  } catch (const Error& error) {
    refuse(std::string("GPUs refuse this layer: ") + error.what());
  }
}

void add_layer(const LayerOptions& layer, Json& json) {
  const Target target(layer);
  if (layer.engine == EngineKind::kAuto || target.is_elsewhere()) require_for_gpus(layer);
  const Placement placement = place_ids(layer, make_ids(layer));
  json["engine"] = engine_name(target.machine().engine);
  json["elsewhere"] = target.is_elsewhere();
  json["ranks"] = target.machine().ranks;
  json["workers"] = target.machine().workers;
  json["shape"] = {{"hidden", layer.shape.hidden},
                   {"intermediate", layer.shape.intermediate},
                   {"experts", layer.shape.experts},
                   {"topk", layer.shape.topk}};
  json["tokens"] = layer.tokens();
  for (int rank = 0; rank < target.machine().ranks; ++rank) json["rows_per_rank"].push_back(placement.rows(rank));
  json["memory"]["forward"] = memory_of(target, layer, placement, Direction::kForward);
  try {
    json["memory"]["backward"] = memory_of(target, layer, placement, Direction::kBackward);
    json["modes"] = save_modes(target, layer, placement);
  } catch (const Error& error) {
    // Else forward's schedule is not one of backward's: the memory of forward is still of use.
    if (error.status() != Status::kUnsupported && error.status() != Status::kInvalidArgument) throw;
    json["backward_refused"] = error.what();
  }
}

std::string engine_line(const Json& engine) {
  if (!engine["available"].get<bool>()) return "not available: " + engine["reason"].get<std::string>();
  if (!engine.contains("instruction_set")) return fmt::format("{} workers a rank", engine["workers"].get<int>());
  return fmt::format("{}, {} cores", engine["instruction_set"].get<std::string>(), engine["cores"].get<int>());
}

const char* const kKinds[] = {"saved", "workspace", "symmetric"};

double gib(uint64_t bytes) {
  return static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0);
}

uint64_t bytes_of(const Json& need, const std::string& kind) {
  return need[kind + "_bytes"].get<uint64_t>();
}

// Of the rank that needs most, in whichever direction.
uint64_t most_bytes(const Json& memory, const std::string& kind) {
  uint64_t most = 0;
  for (const Json& ranks : memory) {
    for (const Json& need : ranks) most = std::max(most, bytes_of(need, kind));
  }
  return most;
}

std::string summary(const Json& json) {
  const Json& memory = json["memory"];
  const uint64_t saved = most_bytes(memory, "saved");
  const uint64_t shared = most_bytes(memory, "workspace") + most_bytes(memory, "symmetric");
  return fmt::format(
      "{:<10}{:.3f} GiB for each forward whose backward is to come, {:.3f} GiB once for all layers "
      "({}; weights, gradients and tokens not counted)\n",
      "a rank", gib(saved), gib(shared),
      json["elsewhere"].get<bool>() ? "Hopper GPUs elsewhere, a process each"
                                    : "the " + json["engine"].get<std::string>() + " engine");
}

std::string memory_table(const Json& json) {
  std::string text = fmt::format("{:<10}{:<6}{:>8}{:>10}", "GiB", "rank", "tokens", "rows");
  for (const char* kind : kKinds) text += fmt::format("{:>11}", kind);
  text += '\n';
  for (const auto& [direction, ranks] : json["memory"].items()) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      text += fmt::format("{:<10}{:<6}{:>8}{:>10}", direction, rank, json["tokens"][rank].get<int64_t>(),
                          json["rows_per_rank"][rank].get<int64_t>());
      for (const char* kind : kKinds) text += fmt::format("{:>11.3f}", gib(bytes_of(ranks[rank], kind)));
      text += '\n';
    }
  }
  return text;
}

constexpr const char* kKindsExplained =
    "saved: what a forward keeps for its backward: z unless save.z=recompute, the dispatched rows unless "
    "save.xg=redispatch\n"
    "workspace: between the stages of one call, given back when it ends\n"
    "symmetric: what other ranks reach; the group holds it, all its layers share it\n";

std::string modes_table(const Json& json) {
  if (!json.contains("modes")) return "";
  std::string text =
      fmt::format("{:<36}{:>11}{:>11}{:>15}\n", "ways to save, GiB", "saved", "workspace", "bytes a token");
  for (const Json& mode : json["modes"]) {
    const std::string name =
        fmt::format("save.xg={},save.z={}", mode["save.xg"].get<std::string>(), mode["save.z"].get<std::string>());
    text += fmt::format("{:<36}{:>11.3f}{:>11.3f}{:>15.0f}\n", name, gib(mode["saved_bytes"].get<uint64_t>()),
                        gib(mode["workspace_bytes"].get<uint64_t>()), mode["saved_bytes_per_token"].get<double>());
  }
  return text;
}

std::string layer_line(const Json& json) {
  const auto size = [&](const char* name) { return json["shape"][name].get<int64_t>(); };
  return fmt::format("{:<10}H {}, I {}, E {}, K {}; {} on {} ranks x {} workers\n", "layer", size("hidden"),
                     size("intermediate"), size("experts"), size("topk"), json["engine"].get<std::string>(),
                     json["ranks"].get<int>(), json["workers"].get<int>());
}

std::string to_table(const Json& json) {
  std::string text = fmt::format("{:<10}{}\n", "uniep", json["version"].get<std::string>());
  for (const auto& [name, engine] : json["engines"].items())
    text += fmt::format("{:<10}{}\n", name, engine_line(engine));
  if (!json.contains("memory")) return text;
  text += layer_line(json) + summary(json) + memory_table(json) + kKindsExplained + modes_table(json);
  if (json.contains("backward_refused")) {
    text += fmt::format("{:<10}{}\n", "backward", json["backward_refused"].get<std::string>());
  }
  return text;
}

int run_info(const InfoOptions& options, bool with_layer) {
  OutputFile json_file("--json", options.json == "-" ? "" : options.json);
  Json json;
  json["version"] = UNIEP_VERSION_STRING;
  json["engines"] = engines();
  if (with_layer) add_layer(options.layer, json);
  write_report(options.json, json_file, json.dump(2) + "\n", to_table(json));
  return 0;
}

}  // namespace

void add_info_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command = app.add_subcommand("info", "Version, engines, and the memory that a layer needs");
  const auto options = std::make_shared<InfoOptions>();
  command->add_option("--json", options->json, "report as JSON; -: on standard output")->type_name("FILE|-");
  const std::size_t own_options = command->get_options().size();
  add_layer_options(*command, options->layer);
  command->callback([options, command, own_options, &action] {
    // Any option about a layer asks for what it needs.
    const std::vector<CLI::Option*> all = command->get_options();
    const bool with_layer = std::any_of(all.begin() + static_cast<std::ptrdiff_t>(own_options), all.end(),
                                        [](const CLI::Option* option) { return option->count() > 0; });
    action = [options, with_layer] { return run_info(*options, with_layer); };
  });
}

}  // namespace uniep::cli
