#include "cli/schedule_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "cli/layer_options.h"
#include "cli/options.h"
#include "program/checker.h"
#include "program/recompute.h"
#include "program/schedule_fields.h"
#include "program/schedule_space.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxSamples = 1'000'000;

struct ScheduleOptions {
  LayerOptions layer;
  Direction direction = Direction::kForward;
  Operation operation = Operation::kLayer;
  bool reference = false;
  bool count = false;
  bool check = false;
  int samples = 0;
  std::vector<std::string> vary;
};

// The machine of the engine; a schedule for the cuda engine may be asked for where there is no GPU.
Machine machine_of(const LayerOptions& options) {
  GroupOptions group;
  group.engine = options.engine;
  group.ranks = options.ranks;
  group.workers = options.workers;
  try {
    return Group(group).machine();
  } catch (const Error& error) {
    if (options.engine != EngineKind::kCuda || error.status() != Status::kUnsupported) throw;
  }
  return absent_gpu(options);
}

CheckReport prove(const ScheduleOptions& options, const Machine& machine, const Placement& placement,
                  const Schedule& schedule) {
  ProgramRequest request;
  request.shape = options.layer.shape;
  request.numerics = options.layer.numerics;
  request.schedule = schedule;
  request.direction = options.direction;
  request.redispatch = options.direction == Direction::kBackward && dispatches_x_again(schedule, true);
  request.workers = machine.workers;
  return check_program(Program(request, placement.state()));
}

std::vector<Schedule> wanted_schedules(const ScheduleOptions& options, const Machine& machine) {
  const LayerOptions& layer = options.layer;
  if (options.samples == 0) return {layer.resolved(options.direction, machine, options.operation)};
  std::vector<Schedule> schedules;
  for (int sample = 0; sample < options.samples; ++sample) {
    schedules.push_back(sample_legal(
        layer.seed + static_cast<uint64_t>(sample),
        {.direction = options.direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine},
        layer.given(options.direction)));
  }
  return schedules;
}

void print_counts(const ScheduleOptions& options, const Machine& machine) {
  const LayerOptions& layer = options.layer;
  const SpaceLimits limits{layer.given(options.direction), options.vary};
  const SpaceCounts counts = count_space(
      {.direction = options.direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine}, limits);
  std::cout << "legal     " << counts.legal << "\nbuildable " << counts.buildable << "\ndistinct  ";
  if (counts.distinct) {
    std::cout << *counts.distinct << '\n';
  } else {
    std::cout << "not counted: stages' own tiles vary, and there are too many to go through one by one\n";
  }
  std::cout << "of these values:\n";
  for (const std::string& line : space_values(
           {.direction = options.direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine},
           limits)) {
    std::cout << "  " << line << '\n';
  }
}

int run_schedule(const ScheduleOptions& options) {
  if (options.reference) {
    std::cout << schedule_reference_markdown();
    return 0;
  }
  if (options.operation != Operation::kLayer && (options.count || options.samples > 0 || options.check)) {
    throw Error(Status::kInvalidArgument, "--op: must be layer with --count, --sample and --check");
  }
  if (options.operation != Operation::kLayer && options.direction == Direction::kBackward) {
    throw Error(Status::kInvalidArgument, "--direction: backward; must be forward with --op dispatch and combine");
  }
  const LayerOptions& layer = options.layer;
  const Machine machine = machine_of(layer);
  if (options.count) {
    layer.resolved(options.direction, machine);  // says what is wrong where nothing is legal
    print_counts(options, machine);
    return 0;
  }
  const std::vector<Schedule> schedules = wanted_schedules(options, machine);
  if (!options.check) {
    for (const Schedule& schedule : schedules) std::cout << to_json(schedule) << '\n';
    return 0;
  }
  const Placement placement = place_ids(layer, make_ids(layer));
  std::string problems;
  for (const Schedule& schedule : schedules) {
    const CheckReport report = prove(options, machine, placement, schedule);
    Json json;
    json["schedule"] = Json::parse(to_json(schedule));
    json["check"] = {
        {"ok", report.ok}, {"tasks", report.tasks}, {"edges", report.edges}, {"problems", report.problems}};
    std::cout << json.dump() << '\n';
    if (report.ok || !problems.empty()) continue;
    problems = fmt::format("{}: {}", to_text(schedule), fmt::join(report.problems, "; "));
  }
  if (!problems.empty()) throw std::runtime_error("--check: " + problems);
  return 0;
}

}  // namespace

void add_schedule_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command =
      app.add_subcommand("schedule", "Print the filled schedule of a layer as JSON; count, sample and prove schedules");
  const auto options = std::make_shared<ScheduleOptions>();
  add_layer_options(*command, options->layer);
  add_word_option<Direction>(*command, "--direction", options->direction,
                             {{"forward", Direction::kForward}, {"backward", Direction::kBackward}},
                             "direction of the schedule (default forward)");
  add_word_option<Operation>(
      *command, "--op", options->operation,
      {{"layer", Operation::kLayer}, {"dispatch", Operation::kDispatch}, {"combine", Operation::kCombine}},
      "what the schedule is for (default layer)");
  command->add_flag("--reference", options->reference, "print the reference of all fields (Markdown)");
  command->add_flag(
      "--count", options->count,
      "print how many schedules are legal, have a kernel, and run differently, --schedule's fields being fixed");
  add_text_option(
      *command, "--vary",
      [options](const std::string& text) {
        std::istringstream fields(text);
        for (std::string field; std::getline(fields, field, ',');) options->vary.push_back(field);
      },
      "FIELD,...", "with --count: the fields that vary (default: all that are not given)");
  add_text_option(
      *command, "--sample",
      [options](const std::string& text) {
        options->samples = static_cast<int>(parse_integer("--sample", text, 1, kMaxSamples));
      },
      "N", "print N legal schedules drawn from --seed (default the filled one)");
  command->add_flag("--check", options->check,
                    "prove of the tiles and their order that nothing is missed or waits for ever");
  command->callback([options, &action] { action = [options] { return run_schedule(*options); }; });
}

}  // namespace uniep::cli
