#include "cli/info_command.h"

#include <fmt/format.h>

#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/layer_options.h"
#include "cli/output_file.h"
#include "engine/cpu/kernels.h"
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

Json memory_of(const Group& group, const LayerOptions& layer, const Placement& placement, Direction direction) {
  Json ranks = Json::array();
  const Schedule schedule = layer.resolved(direction, group.machine());
  for (const MemoryNeed& need : memory_need(group, layer.config(), schedule, direction, placement)) {
    ranks.push_back({{"saved_bytes", need.saved_bytes},
                     {"workspace_bytes", need.workspace_bytes},
                     {"symmetric_bytes", need.symmetric_bytes}});
  }
  return ranks;
}

void add_layer(const LayerOptions& layer, Json& json) {
  GroupOptions options;
  options.engine = layer.engine;
  options.ranks = layer.ranks;
  options.workers = layer.workers;
  const Group group(options);
  const Placement placement = place_ids(layer, make_ids(layer));
  json["engine"] = engine_name(group.engine());
  json["ranks"] = group.ranks();
  json["workers"] = group.workers();
  json["shape"] = {{"hidden", layer.shape.hidden},
                   {"intermediate", layer.shape.intermediate},
                   {"experts", layer.shape.experts},
                   {"topk", layer.shape.topk}};
  json["tokens"] = layer.tokens();
  for (int rank = 0; rank < group.ranks(); ++rank) json["rows_per_rank"].push_back(placement.rows(rank));
  json["memory"]["forward"] = memory_of(group, layer, placement, Direction::kForward);
  try {
    json["memory"]["backward"] = memory_of(group, layer, placement, Direction::kBackward);
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

std::string to_table(const Json& json) {
  std::string text = fmt::format("{:<10}{}\n", "uniep", json["version"].get<std::string>());
  for (const auto& [name, engine] : json["engines"].items())
    text += fmt::format("{:<10}{}\n", name, engine_line(engine));
  if (!json.contains("memory")) return text;
  const Json& shape = json["shape"];
  text += fmt::format("{:<10}H {}, I {}, E {}, K {}; {} on {} ranks x {} workers\n", "layer",
                      shape["hidden"].get<int64_t>(), shape["intermediate"].get<int64_t>(),
                      shape["experts"].get<int64_t>(), shape["topk"].get<int64_t>(), json["engine"].get<std::string>(),
                      json["ranks"].get<int>(), json["workers"].get<int>());
  text += fmt::format("{:<10}{:<6}{:>8}{:>10}{:>16}{:>16}{:>16}\n", "bytes", "rank", "tokens", "rows", "saved",
                      "workspace", "symmetric");
  for (const auto& [direction, ranks] : json["memory"].items()) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const Json& need = ranks[rank];
      text += fmt::format("{:<10}{:<6}{:>8}{:>10}{:>16}{:>16}{:>16}\n", direction, rank,
                          json["tokens"][rank].get<int64_t>(), json["rows_per_rank"][rank].get<int64_t>(),
                          need["saved_bytes"].get<uint64_t>(), need["workspace_bytes"].get<uint64_t>(),
                          need["symmetric_bytes"].get<uint64_t>());
    }
  }
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
  add_shape_option(*command, options->layer);
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
