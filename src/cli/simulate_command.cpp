#include "cli/simulate_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

#include "cli/layer_options.h"
#include "cli/machine_option.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "cli/report_words.h"
#include "cli/simulate_report.h"
#include "cli/solve_request.h"
#include "cli/trace_compare.h"
#include "cli/trace_file.h"
#include "cli/traced_run.h"
#include "io/file.h"
#include "io/json_text.h"
#include "io/quote.h"
#include "sim/simulate.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

struct SimulateCommandOptions {
  LayerOptions layer;
  Direction direction = Direction::kForward;
  std::string machine = sim::kDefaultMachine;
  sim::State state = sim::State::kSustained;
  double limit_ghz = 0;  // 0: by the layer's own load
  bool one_rank = false;
  std::string trace, against, report, json;
};

double parse_clock(const std::string& text) {
  double clock = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), clock);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || !(clock >= 0.01 && clock <= 100)) refuse_value("--limit-clock", text, "0.01 to 100 (GHz)");
  return clock;
}

Json summary_json(const TraceSummary& summary) {
  Json json;
  json["begin_ms"] = rounded(summary.begin_ms);
  json["waits_ms"] = rounded(summary.waits_ms);
  json["end_ms"] = rounded(summary.end_ms);
  json["stages"] = Json::object();
  for (const auto& [name, stage] : summary.stages) {
    json["stages"][name] = {{"tiles", stage.tiles},
                            {"tile_us", rounded(stage.mean_us)},
                            {"begin_ms", rounded(stage.begin_ms)},
                            {"end_ms", rounded(stage.end_ms)}};
  }
  return json;
}

Json report_json(const SimulateCommandOptions& options, const Schedule& schedule, const sim::Simulated& result) {
  Json json;
  json["ms"] = rounded(result.ms);
  json["ms_per_rank"] = Json::array();
  for (const double ms : result.ms_per_rank) json["ms_per_rank"].push_back(rounded(ms));
  if (result.again_ms > 0) json["again_ms"] = rounded(result.again_ms);
  json["bound_ms"] = rounded(result.limits.bound_ms());
  json["limits"] = result.limits.name();
  json["limits_ms"] = {{"gemm", rounded(result.limits.gemm_ms)},
                       {"links", rounded(result.limits.links_ms)},
                       {"memory", rounded(result.limits.memory_ms)},
                       {"begin and end", rounded(result.limits.begin_end_ms)}};
  json["clock_ghz"] = rounded(result.clock_ghz);
  json["load"] = rounded(result.load);
  json["stages"] = Json::object();
  for (const auto& [name, stage] : result.stages) {
    json["stages"][name] = {
        {"begin_ms", rounded(stage.begin_ms)}, {"end_ms", rounded(stage.end_ms)}, {"busy_ms", rounded(stage.busy_ms)}};
  }
  json["direction"] = direction_name(options.direction);
  json["schedule"] = Json::parse(to_json(schedule));
  json["machine"] = options.machine;
  return json;
}

std::string side_by_side(const TraceSummary& measured, const TraceSummary& simulated) {
  std::string text = fmt::format("\n{:<24}{:>12}{:>12}{:>10}\n", "", "timeline", "simulated", "ratio");
  const auto line = [&](const std::string& what, double a, double b) {
    text += fmt::format("{:<24}{:>12.4g}{:>12.4g}{:>10}\n", what, a, b, a > 0 ? fmt::format("{:.3f}", b / a) : "-");
  };
  line("first GEMM tile, ms", measured.begin_ms, simulated.begin_ms);
  for (const auto& [name, stage] : measured.stages) {
    const TracedStage& other = simulated.stages.at(name);
    line(name + ": tiles", static_cast<double>(stage.tiles), static_cast<double>(other.tiles));
    line(name + ": a tile, us", stage.mean_us, other.mean_us);
    line(name + ": end, ms", stage.end_ms, other.end_ms);
  }
  line("waits of a worker, ms", measured.waits_ms, simulated.waits_ms);
  line("end, ms", measured.end_ms, simulated.end_ms);
  return text;
}

void print(const SimulateCommandOptions& options, const sim::Simulated& result) {
  std::cout << fmt::format("{} on {}: {:.3f} ms at {:.2f} GHz; bound {:.3f} ms by {}\n",
                           direction_name(options.direction), options.machine, result.ms, result.clock_ghz,
                           result.limits.bound_ms(), result.limits.name());
  if (result.again_ms > 0)
    std::cout << fmt::format("  {:<10} {:8.3f} ms, before all that follows\n", "FC1 again", result.again_ms);
  for (const auto& [name, stage] : result.stages) {
    std::cout << fmt::format("  {:<10} {:8.3f} to {:8.3f} ms, a worker busy {:8.3f} ms\n", name, stage.begin_ms,
                             stage.end_ms, stage.busy_ms);
  }
}

// What a schedule sees of `machine`, as far as the options use it. Throws Error for what it has not.
Machine target_machine(const LayerOptions& layer, const sim::MachineDescription& machine) {
  if (layer.engine == EngineKind::kCpu) refuse_value("--engine", "cpu", "cuda or auto: the machine's engine is timed");
  if (layer.ranks > machine.most_ranks()) {
    refuse_value("--ranks", std::to_string(layer.ranks),
                 fmt::format("at most {}, which {} links", machine.most_ranks(), machine.name));
  }
  Machine target = sim::schedule_machine(machine, layer.ranks);
  if (layer.workers > target.workers) {
    refuse_value("--workers", std::to_string(layer.workers), fmt::format("at most {}", target.workers));
  }
  if (layer.workers > 0) target.workers = layer.workers;
  return target;
}

// Rank 0 stands for all: it may not have much less to do than the busiest rank, for which all wait.
void require_one_rank_to_do(const LayerOptions& layer, const Placement& placement) {
  constexpr double kFewer = 0.9;
  if (one_rank_stands_for_all(layer)) return;
  int busiest = 0;
  for (int rank = 1; rank < layer.ranks; ++rank) {
    if (placement.rows(rank) > placement.rows(busiest)) busiest = rank;
  }
  const int64_t rows = placement.rows(0), most = placement.rows(busiest);
  if (static_cast<double>(rows) >= kFewer * static_cast<double>(most)) return;
  throw Error(Status::kInvalidArgument,
              fmt::format("--one-rank: rank 0 has {} rows and rank {} {}; must be about as many as on the busiest, or "
                          "leave it out",
                          rows, busiest, most));
}

struct TracePair {
  TraceSummary measured, simulated;
};

// Throws Error where the timeline `other` of --against is of another Program than the simulated one.
TracePair compare_traces(const SimulateCommandOptions& options, const Trace& other, const std::string& simulated_json,
                         const std::function<std::string(const TraceSummary&)>& differing) {
  const std::string call = direction_name(options.direction);
  TracePair pair;
  pair.simulated = summarize(parse_trace(simulated_json, "simulated"), call, "simulated");
  naming_option("--against", [&] {
    pair.measured = summarize(other, call, options.against);
    std::string differs = differing_call(pair.measured, pair.simulated);
    if (differs.empty()) differs = differing(pair.measured);
    if (differs.empty()) return;
    throw Error(Status::kInvalidArgument,
                fmt::format("{} is of something else: {}", io::quote_path(options.against), differs));
  });
  return pair;
}

TracedMachine simulated_gpus(const sim::MachineDescription& machine, const SimulateCommandOptions& options,
                             const Machine& target) {
  return {.engine = "simulator",
          .device = "simulated " + machine.name,
          .gpus = options.one_rank ? 1 : options.layer.ranks,
          .compute_units = static_cast<int>(machine.class_of(sim::Work::kFc1).count),
          .workers = target.workers};
}

int run_simulate(const SimulateCommandOptions& options) {
  if (options.limit_ghz > 0 && options.state == sim::State::kPaused) {
    refuse_value("--limit-clock", fmt::format("{:g}", options.limit_ghz), "left out with --state paused");
  }
  if (!options.report.empty()) options.layer.require_tokens("--report, whose timelines would be empty");
  const sim::MachineDescription machine = load_machine(options.machine);
  const LayerOptions& layer = options.layer;
  const Machine target = target_machine(layer, machine);
  const Schedule schedule = layer.resolved(options.direction, target);
  std::optional<Trace> other;
  if (!options.against.empty()) {
    other =
        naming_option("--against", [&] { return parse_trace(io::read_text_file(options.against), options.against); });
  }
  OutputFile trace_file("--trace", options.trace);
  const bool json_to_stdout = options.json == "-";
  OutputFile json_file("--json", json_to_stdout ? "" : options.json);
  OutputFile report_file("--report", options.report);

  const Placement placement = place_ids(layer, make_ids(layer));
  if (options.one_rank) require_one_rank_to_do(layer, placement);
  const auto program_of = [&](const Schedule& of) {
    ProgramRequest request = sim::simulated_request(layer.shape, layer.numerics, of, options.direction, machine);
    request.workers = target.workers;
    return Program(request, placement.state());
  };
  const Program program = program_of(schedule);
  sim::SimulateOptions how;
  how.state = options.state;
  how.limit_ghz = options.limit_ghz;
  how.one_rank = options.one_rank;
  how.record = !options.trace.empty() || !options.report.empty() || other.has_value();
  const sim::Simulated result = sim::simulate(program, machine, how);

  Json json = report_json(options, schedule, result);
  std::string compared;
  if (how.record) {
    const TracedCall traced{direction_name(options.direction), sim::tile_events(program, result.timeline),
                            traced_layer(layer, schedule, simulated_gpus(machine, options, target), options.state)};
    const std::string title = fmt::format("simulated: {}, {} ranks, {}", machine.title, layer.ranks, to_text(schedule));
    const std::string text = trace_json(title, std::span(&traced, 1));
    if (other) {
      const ScheduleRequest of = {
          .direction = options.direction, .shape = layer.shape, .numerics = layer.numerics, .machine = target};
      const TracePair pair = compare_traces(options, *other, text, [&](const TraceSummary& measured) {
        return differing_schedule(measured, of, schedule);
      });
      json["against"] = {{"timeline", summary_json(pair.measured)}, {"simulated", summary_json(pair.simulated)}};
      compared = side_by_side(pair.measured, pair.simulated);
    }
    if (!options.trace.empty()) trace_file.write(text);
    if (!options.report.empty()) {
      LayerOptions plain = layer;
      plain.schedule = plain.schedule_backward = {};
      const Schedule base = plain.resolved(options.direction, target);
      how.record = false;
      const double base_ms = sim::simulate(program_of(base), machine, how).ms;
      report_file.write(simulate_report({layer, options.direction, machine, schedule, result, traced, base, base_ms}));
    }
  }
  if (json_to_stdout) {
    std::cout << io::json_text(json, 2) << '\n';
    return 0;
  }
  if (!options.json.empty()) json_file.write(io::json_text(json, 2) + "\n");
  print(options, result);
  std::cout << compared;
  return 0;
}

}  // namespace

void add_simulate_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command = app.add_subcommand("simulate", "Time a layer's schedule on a machine without running it");
  const auto options = std::make_shared<SimulateCommandOptions>();
  add_layer_options(*command, options->layer);
  add_machine_option(*command, options->machine);
  add_word_option<Direction>(*command, "--direction", options->direction,
                             {{"forward", Direction::kForward}, {"backward", Direction::kBackward}},
                             "direction that is simulated (default forward)");
  add_word_option<sim::State>(*command, "--state", options->state,
                              {{"sustained", sim::State::kSustained}, {"paused", sim::State::kPaused}},
                              "clocks: one call after the other, or after pauses (default sustained)");
  add_text_option(
      *command, "--limit-clock", [options](const std::string& text) { options->limit_ghz = parse_clock(text); }, "GHZ",
      "what the power limit leaves, where other calls take turns with this one (default by its own load)");
  command->add_flag("--one-rank", options->one_rank,
                    "rank 0 stands for all: many times faster, for routing that gives it as much as others");
  command->add_option("--trace", options->trace, "timeline as Perfetto JSON")->type_name("FILE");
  command->add_option("--against", options->against, "timeline of an engine to lay beside the simulated one")
      ->type_name("FILE");
  command->add_option("--report", options->report, "all of it as an HTML page, and the layer on other machines")
      ->type_name("FILE.html");
  command->add_option("--json", options->json, "report as JSON; -: on standard output")->type_name("FILE|-");
  command->callback([options, &action] { action = [options] { return run_simulate(*options); }; });
}

}  // namespace uniep::cli
