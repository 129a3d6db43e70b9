#include "cli/tune_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "api/machine_name.h"
#include "cli/chosen_schedule.h"
#include "cli/launch_options.h"
#include "cli/layer_inputs.h"
#include "cli/listed_schedules.h"
#include "cli/machine_option.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "cli/report_words.h"
#include "cli/run_report.h"
#include "cli/tune_candidates.h"
#include "cli/tune_report.h"
#include "cli/tune_trial.h"
#include "engine/cuda/calls/engine.h"
#include "engine/engine.h"
#include "io/file.h"
#include "io/json_text.h"
#include "tune/calibrated_machine.h"
#include "tune/journal.h"
#include "tune/rank_names.h"
#include "tune/trial_mark.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMostTimed = 1023;  // beside the default
constexpr int kMostTuneSeconds = 86400;
constexpr int kMaxRounds = 1000;

struct TuneOptions {
  LayerOptions layer;
  std::vector<int> devices;
  LaunchOptions launch;
  std::vector<Direction> directions = {Direction::kForward, Direction::kBackward};
  int candidates = 16;
  int budget = 60;
  int rounds = tune::SearchOptions().rounds;
  std::string schedules;                                    // a file; empty: what the solver and the neighbours give
  std::string machine;                                      // empty: of these GPUs
  std::optional<sim::MachineDescription> description = {};  // that
  sim::State state = sim::State::kSustained;
  bool again = false;
  bool traces = false;  // of the default and of what is taken, for rank 0's report
  std::string exported, json, report;
};

// A cache that can not be written ends its use, with a line, and no search.
class Cache {
 public:
  void write(const std::function<void()>& work) {
    if (!is_written_) return;
    try {
      work();
    } catch (const Error& error) {
      is_written_ = false;
      std::cerr << fmt::format("uniep tune: {}; what is found is not kept in the cache\n", error.what());
    }
  }

 private:
  bool is_written_ = true;
};

// One more call of a Schedule, with its timeline.
TracedCall traced_call(LayerRunner& runner, Direction direction, const Schedule& schedule) {
  const bool forward = direction == Direction::kForward;
  TracedCall call{forward ? "forward" : "backward", {}};
  forward ? runner.forward(schedule, &call.events) : runner.backward(schedule, &call.events);
  return call;
}

sim::MachineDescription description_of(const TuneOptions& options, const Group& group) {
  if (!options.machine.empty()) return load_machine(options.machine);
  if (group.engine() != EngineKind::kCuda) return sim::shipped_machine(sim::kDefaultMachine);
  const std::string device = cuda::device_label(group.device(group.first_local_rank()));
  std::string doubt;
  if (std::optional<sim::MachineDescription> calibrated = tune::find_calibrated(device, doubt)) return *calibrated;
  if (!doubt.empty() && group.first_local_rank() == 0) {
    std::cerr << "uniep tune: " << doubt << "; it is left out\n";
  }
  const sim::MachineDescription* const shipped = sim::machine_of_device(device);
  return shipped != nullptr ? *shipped : sim::shipped_machine(sim::kDefaultMachine);
}

// All ranks tune one layer in the same way: of another layer it throws on all of them, and of what the search may take
// rank 0's counts.
void agree_on_options(TuneOptions& options, Group& group) {
  const LayerOptions& layer = options.layer;
  std::string what = layer.routing + ";" + std::to_string(layer.seed);
  for (const int64_t tokens : layer.tokens()) what += ";" + std::to_string(tokens);
  for (const Direction direction : options.directions) {
    tune::TunedKey key = tuned_key(layer, direction, group);
    key.machine.clear();  // a rank's GPU may have a speed of its own
    what += ";" + tune::to_json({{.key = key, .schedule = layer.resolved(direction, group.machine())}});
  }
  if (const std::vector<int> others = ranks_that_differ(group, what); !others.empty()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("tune: {} given another layer, --tokens, --routing, --direction or --schedule than rank 0",
                            tune::rank_names(others, "was", "were")));
  }
  const std::string own = fmt::format("{} {} {} {} {}", options.candidates, options.budget, options.rounds,
                                      static_cast<int>(options.state), options.report.empty() ? 0 : 1);
  const std::vector<int> others = ranks_that_differ(group, own);
  if (!others.empty() && group.first_local_rank() == 0) {
    std::cerr << fmt::format(
        "uniep tune: {} another --candidates, --budget, --rounds, --state or --report; rank 0's count\n",
        tune::rank_names(others, "has", "have"));
  }
  int state = 0, traces = 0;
  std::istringstream(text_of_first_rank(group, own)) >> options.candidates >> options.budget >> options.rounds >>
      state >> traces;
  options.state = static_cast<sim::State>(state);
  options.traces = traces != 0;
}

// What an earlier search has found is compared with what this one tries.
std::optional<Schedule> kept_schedule(const TuneOptions& options, Direction direction, const Group& group) {
  const std::optional<tune::TunedSchedule> entry = tuned_folder().find(tuned_key(options.layer, direction, group));
  if (!entry) return std::nullopt;
  std::string why;
  return overlaid(options.layer, direction, group, entry->schedule, why);
}

// The default first.
std::vector<Schedule> own_candidates(const TuneOptions& options, const ScheduleRequest& request, const Group& group) {
  std::vector<Schedule> all;
  if (options.schedules.empty()) {
    all = tune_candidates(options.layer, request.direction, request.machine, *options.description, options.candidates);
    const std::optional<Schedule> kept = kept_schedule(options, request.direction, group);
    if (kept && std::find(all.begin(), all.end(), *kept) == all.end()) all.insert(all.begin() + 1, *kept);
    return all;
  }
  all.push_back(options.layer.resolved(request.direction, request.machine));
  for (const Schedule& schedule : listed_schedules(options.schedules, options.layer, request, kMostTimed)) {
    if (std::find(all.begin(), all.end(), schedule) == all.end()) all.push_back(schedule);
  }
  return all;
}

// Rank 0's: what the others have calibrated, kept, or in their file, does not count.
std::vector<tune::Tried> candidates_of(const TuneOptions& options, Direction direction, Group& group) {
  const ScheduleRequest request = {.direction = direction,
                                   .shape = options.layer.shape,
                                   .numerics = options.layer.numerics,
                                   .machine = group.machine()};
  std::istringstream lines(text_made_by_first_rank(group, [&] {
    std::string text;
    for (const Schedule& schedule : own_candidates(options, request, group)) text += to_text(schedule) + "\n";
    return text;
  }));
  std::vector<tune::Tried> all;
  for (std::string line; std::getline(lines, line);) {
    all.push_back({.schedule = resolve(PartialSchedule::parse(line), request)});
  }
  return all;
}

// What rank 0's journal knows counts.
void mark_known(Group& group, const tune::Journal& journal, std::vector<tune::Tried>& candidates) {
  if (group.first_local_rank() == 0) journal.mark(candidates);
  std::string known;
  for (const tune::Tried& tried : candidates) known += static_cast<char>('0' + static_cast<int>(tried.verdict));
  known = text_of_first_rank(group, known);
  for (std::size_t i = 0; i < candidates.size(); ++i)
    candidates[i].verdict = static_cast<tune::Verdict>(known[i] - '0');
}

// What is not known yet, compiled before it is tried, several kernels at once. Processes of one host share the work. A
// kernel that does not compile is met again where its Schedule is tried.
void compile_candidates(const TuneOptions& options, Direction direction, Group& group,
                        const std::vector<tune::Tried>& candidates) {
  const Machine machine = group.machine();
  if (machine.engine != EngineKind::kCuda) return;
  const int processes = machine.ranks / group.local_ranks(), process = group.first_local_rank() / group.local_ranks();
  std::vector<cuda::CompiledCall> calls;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].verdict != tune::Verdict::kUntried || static_cast<int>(i) % processes != process) continue;
    calls.push_back({options.layer.config(), machine.ranks, machine.workers, candidates[i].schedule, direction});
  }
  if (process == 0) std::cerr << fmt::format("uniep tune: {}: compiling kernels\n", direction_name(direction));
  try {
    cuda::compile_calls(calls, std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / processes));
  } catch (const Error&) {
  }
  group.implementation().all_gather(0);
}

// All processes of the search mark what is tried, or none does.
void mark_together(Group& group, tune::TrialMark& mark) {
  group.implementation().all_gather(0);  // until all have made their files
  if (text_of_first_rank(group, mark.all_are_there() ? "all" : "").empty()) mark.drop();
}

TunedDirection tune_direction(const TuneOptions& options, Direction direction, Group& group, LayerRunner& runner,
                              const Schedule& forward) {
  const bool reports = group.first_local_rank() == 0;
  const tune::TunedFolder folder = tuned_folder();
  TunedDirection tuned;
  tuned.entry.key = tuned_key(options.layer, direction, group);
  std::filesystem::path journal_file;
  if (reports && folder.keeps()) journal_file = folder.path(tuned.entry.key).replace_extension(".tried");
  if (options.again && !journal_file.empty()) tune::Journal::forget(journal_file);
  tune::Journal journal(journal_file);
  Cache cache;
  std::vector<tune::Tried> candidates = candidates_of(options, direction, group);
  const Schedule base = candidates.front().schedule;
  mark_known(group, journal, candidates);
  compile_candidates(options, direction, group, candidates);

  tune::TrialMark mark(text_of_first_rank(group, journal.file().string()),
                       group.first_local_rank() / group.local_ranks(), group.ranks() / group.local_ranks());
  mark_together(group, mark);
  std::size_t decided = 0;
  const std::size_t count = candidates.size();
  tune::SearchOptions search;
  search.budget_milliseconds = options.budget * 1e3;
  search.rounds = options.rounds;
  search.progress = [&](const tune::Tried& tried) {
    const bool begins = tried.verdict == tune::Verdict::kUntried;
    const bool forgiven = tried.verdict == tune::Verdict::kFailed && mark.another_has_left();
    const bool is_marked = mark.marks();
    begins || (tried.verdict == tune::Verdict::kFailed && !forgiven) ? mark.begin(tried.schedule) : mark.end();
    if (!reports) return;
    if (!forgiven && !(begins && is_marked)) cache.write([&] { journal.note(tried); });
    if (begins) return;
    decided += tried.verdict != tune::Verdict::kInTheRunning && tried.verdict != tune::Verdict::kUndecided;
    std::cerr << fmt::format("uniep tune: {}: {} of {} decided; {}: {}{}\n", direction_name(direction), decided, count,
                             tune::verdict_name(tried.verdict), changes(tried.schedule, base),
                             tried.reason.empty() ? "" : " (" + tried.reason + ")");
  };
  LayerTrial trial(group, runner, direction, forward, options.state);
  tuned.search = tune::search(std::move(candidates), trial, search);
  mark.drop();
  const tune::Tried& best = tuned.search.tried[tuned.search.best];
  tuned.entry.schedule = best.schedule;
  tuned.entry.milliseconds = median(best.milliseconds);
  tuned.entry.default_milliseconds = median(tuned.search.tried.front().milliseconds);
  const bool undecided = std::any_of(tuned.search.tried.begin(), tuned.search.tried.end(),
                                     [](const auto& tried) { return tried.verdict == tune::Verdict::kUndecided; });
  if (undecided && reports) {
    std::cerr << fmt::format(
        "uniep tune: {}: the budget of {} s ended before all were compared; the next run goes on\n",
        direction_name(direction), options.budget);
  }
  if (!undecided) cache.write([&] { journal.finish(); });
  // A default that nothing was compared with says no more than no entry.
  tuned.knows = tuned.search.best != 0 || !undecided;
  if (reports && tuned.knows) cache.write([&] { folder.store(tuned.entry); });
  if (!options.traces) return tuned;
  tuned.default_call = traced_call(runner, direction, base);
  tuned.chosen_call = traced_call(runner, direction, best.schedule);
  return tuned;
}

Json json_of(const TunedDirection& tuned) {
  Json json;
  const Schedule& base = tuned.search.tried.front().schedule;
  json["direction"] = direction_name(tuned.entry.key.direction);
  json["machine"] = tuned.entry.key.machine;
  json["schedule"] = Json::parse(to_json(tuned.entry.schedule));
  json["changes"] = changes(tuned.entry.schedule, base);
  json["ms"] = tuned.entry.milliseconds;
  json["default_ms"] = tuned.entry.default_milliseconds;
  json["budget_ended"] = tuned.search.budget_ended;
  json["tried"] = Json::array();
  for (const tune::Tried& tried : tuned.search.tried) {
    Json one = {{"changes", changes(tried.schedule, base)},
                {"schedule", Json::parse(to_json(tried.schedule))},
                {"verdict", tune::verdict_name(tried.verdict)}};
    if (!tried.reason.empty()) one["reason"] = tried.reason;
    one["calls"] = tried.milliseconds.size();
    if (!tried.milliseconds.empty()) {
      one["ms"] = median(tried.milliseconds);
      one["ratio"] = tried.ratio;
      if (std::isfinite(tried.ratio_low)) one["ratio_95"] = {tried.ratio_low, tried.ratio_high};
    }
    json["tried"].push_back(std::move(one));
  }
  return json;
}

std::string table_of(const TunedDirection& tuned) {
  const Schedule& base = tuned.search.tried.front().schedule;
  const tune::Tried& best = tuned.search.tried[tuned.search.best];
  std::string text = fmt::format("{:<9} {:>9} {:>7} {:>6}  {}\n", direction_name(tuned.entry.key.direction), "ms",
                                 "ratio", "calls", "schedule");
  for (const tune::Tried& tried : tuned.search.tried) {
    const bool timed = !tried.milliseconds.empty();
    text += fmt::format("{:<9} {:>9} {:>7} {:>6}  {}\n", &tried == &best ? "taken" : tune::verdict_name(tried.verdict),
                        timed ? fmt::format("{:.3f}", median(tried.milliseconds)) : "-",
                        timed ? fmt::format("{:.3f}", tried.ratio) : "-", tried.milliseconds.size(),
                        changes(tried.schedule, base));
  }
  return text;
}

int tune_group(TuneOptions options) {
  Group group = make_group(options.layer, options.devices, options.launch.launch);
  agree_on_options(options, group);
  options.description = description_of(options, group);
  const bool reports = group.first_local_rank() == 0;
  OutputFile json_file("--json", reports && options.json != "-" ? options.json : "");
  OutputFile export_file("--export", reports ? options.exported : "");
  OutputFile report_file("--report", reports ? options.report : "");
  const bool backward =
      std::find(options.directions.begin(), options.directions.end(), Direction::kBackward) != options.directions.end();
  const LayerData data = make_layer_data(options.layer, {}, backward, {group.first_local_rank(), group.local_ranks()});
  LayerRunner runner(group, options.layer.config(), data);
  Json json = Json::array();
  std::string table;
  std::vector<tune::TunedSchedule> entries;
  std::vector<TunedDirection> directions;
  Schedule forward = options.layer.resolved(Direction::kForward, group.machine());
  for (const Direction direction : options.directions) {
    TunedDirection tuned = tune_direction(options, direction, group, runner, forward);
    if (!reports) continue;
    if (tuned.knows) entries.push_back(tuned.entry);
    json.push_back(json_of(tuned));
    table += table_of(tuned);
    directions.push_back(std::move(tuned));
  }
  if (!reports) return 0;
  const std::string text = io::json_text(Json({{"tuned", json}}), 2) + "\n";
  write_report(options.json, json_file, text, table);
  if (!options.exported.empty()) export_file.write(tune::to_json(entries));
  if (!options.report.empty()) {
    report_file.write(tune_report(options.layer, *options.description, api::machine_name(group), directions));
  }
  return 0;
}

int run_tune(TuneOptions options) {
  if (!options.report.empty()) options.layer.require_tokens("--report, whose timelines would be empty");
  if (launched_ranks(options.launch, "uniep tune", options.devices, options.layer)) return 0;
  return tune_group(std::move(options));
}

}  // namespace

void add_tune_command(CLI::App& app, std::function<int()>& action, const Command& self) {
  CLI::App* command = app.add_subcommand("tune", "Measure which schedules are fastest for a layer; auto takes them");
  const auto options = std::make_shared<TuneOptions>();
  add_layer_options(*command, options->layer);
  add_devices_option(*command, options->devices, "GPUs: rank r runs on entry r mod the length");
  add_launch_option(*command, options->launch);
  options->launch.self = self;
  add_word_option<std::vector<Direction>>(*command, "--direction", options->directions,
                                          {{"forward", {Direction::kForward}},
                                           {"backward", {Direction::kBackward}},
                                           {"both", {Direction::kForward, Direction::kBackward}}},
                                          "what is tuned (default both)");
  CLI::Option* const candidates = add_integer_option(*command, "--candidates", options->candidates, {1, kMostTimed},
                                                     {"N", "schedules that are tried beside the default, a direction"});
  command
      ->add_option("--schedules", options->schedules,
                   "try these beside the default, one a line as --schedule takes them, instead of N that are found")
      ->type_name("FILE")
      ->excludes(candidates);
  add_integer_option(*command, "--budget", options->budget, {1, kMostTuneSeconds},
                     {"SECONDS", "of calls that are timed, a direction"});
  add_integer_option(*command, "--rounds", options->rounds, {1, kMaxRounds},
                     {"N", "calls of each before the slower half is left behind; then twice as many, and so on"});
  add_machine_option(*command, options->machine, "these GPUs, as `uniep calibrate` or the library describes them");
  add_word_option<sim::State>(*command, "--state", options->state,
                              {{"sustained", sim::State::kSustained}, {"paused", sim::State::kPaused}},
                              "clocks that are timed: one call after the other, or after pauses (default sustained)");
  command->add_flag("--again", options->again, "try again what failed or was left behind in an earlier run");
  command->add_option("--export", options->exported, "what was found, for --tuned on machines that are alike")
      ->type_name("FILE");
  command
      ->add_option("--report", options->report,
                   "a page with the schedules, timelines, the bound, and predictions for other machines and sizes")
      ->type_name("FILE.html");
  command->add_option("--json", options->json, "report as JSON; -: on standard output")->type_name("FILE|-");
  command->callback([command, options, &action] {
    options->launch.ranks_given = command->count("--ranks") > 0;
    action = [options] { return run_tune(*options); };
  });
}

}  // namespace uniep::cli
