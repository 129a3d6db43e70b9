#include "cli/solve_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/layer_options.h"
#include "cli/machine_option.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "cli/report_words.h"
#include "cli/simulated_layer.h"
#include "cli/solve_request.h"
#include "io/json_text.h"
#include "tune/solve.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxCandidates = 256;
constexpr int kMaxSimulatedRanks = 8;  // unless asked for: the tables of more take a while

struct SolveOptions {
  LayerOptions layer;
  Direction direction = Direction::kForward;
  std::string machine = sim::kDefaultMachine;
  sim::State state = sim::State::kSustained;
  std::optional<int> simulate;  // candidates; not given: 8 on up to kMaxSimulatedRanks ranks
  std::string json;
};

struct SolvedChoice {
  Schedule schedule;
  double ms = 0, default_ms = 0;
  bool simulated = false;
  std::vector<double> simulated_ms;  // of Solution::best, as many as were simulated
};

// The candidates and the default, timed by discrete events; the default stays where nothing is faster.
SolvedChoice choose(const SolveOptions& options, const tune::SolveRequest& request, const tune::Solution& solution,
                    const std::optional<Placement>& placement) {
  SolvedChoice choice{
      solution.best.front().schedule, solution.best.front().us * 1e-3, solution.default_us * 1e-3, false, {}};
  if (!placement) {
    if (solution.default_us >= solution.best.front().us) return choice;
    choice.schedule = solution.default_schedule;  // of counts that are not among those tried
    choice.ms = choice.default_ms;
    return choice;
  }
  const SimulatedLayer simulated(request, *placement, one_rank_stands_for_all(options.layer));
  choice.simulated = true;
  choice.schedule = solution.default_schedule;
  choice.ms = choice.default_ms = simulated.milliseconds(solution.default_schedule);
  for (const tune::Ranked& candidate : solution.best) {
    choice.simulated_ms.push_back(simulated.milliseconds(candidate.schedule));
    if (choice.simulated_ms.back() >= choice.ms) continue;
    choice.ms = choice.simulated_ms.back();
    choice.schedule = candidate.schedule;
  }
  return choice;
}

Json report_json(const SolveOptions& options, const tune::SolveRequest& request, const tune::Solution& solution,
                 const SolvedChoice& choice) {
  const double bound_ms = solution.bound.us() * 1e-3;
  Json json;
  json["points"] = solution.points;
  json["solve_ms"] = rounded(solution.solve_ms);
  json["schedule"] = Json::parse(to_json(choice.schedule));
  json["predicted_ms"] = rounded(choice.ms);
  json["default_ms"] = rounded(choice.default_ms);
  json["predicted_by"] = choice.simulated ? "simulator" : "closed form";
  json["bound_ms"] = rounded(bound_ms);
  json["gap"] = rounded(choice.ms / bound_ms - 1);
  json["limits"] = solution.bound.limits();
  json["limits_ms"] = {{"gemm", rounded(solution.bound.gemms * 1e-3)},
                       {"links", rounded(solution.bound.links * 1e-3)},
                       {"memory", rounded(solution.bound.memory * 1e-3)},
                       {"begin and end", rounded(solution.bound.path * 1e-3)}};
  json["fields"] = Json::array();
  for (const tune::FieldGain& gain : solution.gains) {
    json["fields"].push_back(
        {{"field", gain.field}, {"value", gain.value}, {"next", gain.other}, {"gain_ms", rounded(gain.us * 1e-3)}});
  }
  json["best"] = Json::array();
  for (std::size_t i = 0; i < solution.best.size(); ++i) {
    Json one;
    one["schedule"] = Json::parse(to_json(solution.best[i].schedule));
    one["closed_form_ms"] = rounded(solution.best[i].us * 1e-3);
    if (choice.simulated) one["simulated_ms"] = rounded(choice.simulated_ms[i]);
    json["best"].push_back(one);
  }
  json["values"] = tune::solved_values(request);
  json["machine"] = options.machine;
  return json;
}

void print(const SolveOptions& options, const tune::Solution& solution, const SolvedChoice& choice) {
  const double bound_ms = solution.bound.us() * 1e-3;
  std::cout << fmt::format("{} schedules in {:.0f} ms on {}\n{}\n", solution.points, solution.solve_ms, options.machine,
                           to_text(choice.schedule));
  std::cout << fmt::format("predicted {:.3f} ms by {}, the default {:.3f} ms\n", choice.ms,
                           choice.simulated ? "the simulator" : "closed form", choice.default_ms);
  std::cout << fmt::format("bound {:.3f} ms by {} (gemm {:.3f}, links {:.3f}, memory {:.3f}), gap {:.1f} %\n", bound_ms,
                           solution.bound.limits(), solution.bound.gemms * 1e-3, solution.bound.links * 1e-3,
                           solution.bound.memory * 1e-3, 100 * (choice.ms / bound_ms - 1));
  std::cout << fmt::format("most of the best by closed form goes by {}\n", solution.estimate.limits);
  std::cout << "what a field buys over its next best value, all else equal, by closed form:\n";
  for (const tune::FieldGain& gain : solution.gains) {
    std::cout << fmt::format("  {:<24} {:<9} over {:<9} {:+8.4f} ms\n", gain.field, gain.value, gain.other,
                             gain.us * 1e-3);
  }
}

int run_solve(const SolveOptions& options) {
  const sim::MachineDescription machine = load_machine(options.machine);
  const LayerOptions& layer = options.layer;
  if (layer.engine == EngineKind::kCpu) refuse_value("--engine", "cpu", "cuda or auto: the machine's engine is timed");
  if (layer.workers > 0) {
    refuse_value("--workers", std::to_string(layer.workers), "none: the machine has its own");
  }
  if (layer.ranks > machine.most_ranks()) {
    refuse_value("--ranks", std::to_string(layer.ranks),
                 fmt::format("at most {}, which {} links", machine.most_ranks(), machine.name));
  }
  const bool json_to_stdout = options.json == "-";
  OutputFile json_file("--json", json_to_stdout ? "" : options.json);

  const int candidates = options.simulate.value_or(layer.ranks <= kMaxSimulatedRanks ? 8 : 0);
  layer.resolved(options.direction, sim::schedule_machine(machine, layer.ranks));  // says what is wrong with sizes
  std::optional<Placement> placement;
  if (candidates > 0 || !is_uniform(layer)) placement = place_ids(layer, make_ids(layer));
  tune::SolveRequest request =
      solve_request({layer, options.direction, options.state}, machine, placement.value_or(Placement()));
  request.best = std::max(candidates, 8);
  if (candidates == 0) placement.reset();
  tune::Solution solution = tune::solve(request);
  if (candidates > 0) solution.best.resize(std::min<std::size_t>(solution.best.size(), candidates));
  const SolvedChoice choice = choose(options, request, solution, placement);

  if (json_to_stdout) {
    std::cout << io::json_text(report_json(options, request, solution, choice), 2) << '\n';
    return 0;
  }
  if (!options.json.empty()) json_file.write(io::json_text(report_json(options, request, solution, choice), 2) + "\n");
  print(options, solution, choice);
  return 0;
}

}  // namespace

void add_solve_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command = app.add_subcommand("solve", "Find the best schedule of a layer on a machine without measuring");
  const auto options = std::make_shared<SolveOptions>();
  add_layer_options(*command, options->layer);
  add_machine_option(*command, options->machine);
  add_word_option<Direction>(*command, "--direction", options->direction,
                             {{"forward", Direction::kForward}, {"backward", Direction::kBackward}},
                             "direction (default forward)");
  add_word_option<sim::State>(*command, "--state", options->state,
                              {{"sustained", sim::State::kSustained}, {"paused", sim::State::kPaused}},
                              "clocks: one call after the other, or after pauses (default sustained)");
  add_text_option(
      *command, "--simulate",
      [options](const std::string& text) {
        options->simulate = static_cast<int>(parse_integer("--simulate", text, 0, kMaxCandidates));
      },
      "N", "rank the best N by simulation; 0: none (default 8 on up to 8 ranks)");
  command->add_option("--json", options->json, "report as JSON; -: on standard output")->type_name("FILE|-");
  command->callback([options, &action] { action = [options] { return run_solve(*options); }; });
}

}  // namespace uniep::cli
