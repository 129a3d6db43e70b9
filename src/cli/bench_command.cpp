#include "cli/bench_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <iostream>
#include <memory>
#include <sstream>

#include "cli/bench_gpus.h"
#include "cli/bench_online.h"
#include "cli/bench_operation.h"
#include "cli/bench_report.h"
#include "cli/launch_options.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "cli/trace_file.h"
#include "comm/bootstrap.h"
#include "model/place.h"

namespace uniep::cli {
namespace {

constexpr int kMostTimedCalls = 1'000'000;
constexpr double kMostBenchSeconds = 3600.0;

struct BenchOptions {
  BenchRequest request;
  LaunchOptions launch;
  std::string operation;
  std::string trace, json;
  OnlineBench online;
  std::string online_only;  // an option that was given and is for --tune online alone
  std::string not_online;   // likewise, and is for all else
};

const std::vector<BenchOperation>& bench_operations() {
  static const std::vector<BenchOperation> kOperations = {gemm_operation(), layer_operation(),    backward_operation(),
                                                          step_operation(), dispatch_operation(), combine_operation()};
  return kOperations;
}

std::string operation_names() {
  std::string names;
  for (const BenchOperation& operation : bench_operations())
    names += (names.empty() ? "" : "|") + std::string(operation.name);
  return names;
}

std::string operation_descriptions() {
  std::string text;
  for (const BenchOperation& operation : bench_operations()) {
    text += (text.empty() ? "" : "; ") + std::string(operation.name) + ": " + operation.description;
  }
  return text;
}

const BenchOperation& find_operation(const std::string& name) {
  for (const BenchOperation& operation : bench_operations()) {
    if (operation.name == name) return operation;
  }
  refuse_value("--op", name, operation_names());
}

void check_request(const BenchOperation& operation, const BenchRequest& request) {
  if (request.layer.engine == EngineKind::kCpu) refuse_value("--engine", "cpu", "cuda or auto: this measures GPUs");
  if (request.layer.numerics.bias && operation.name != std::string("layer") &&
      operation.name != std::string("backward")) {
    throw Error(Status::kInvalidArgument,
                std::string("--bias: with --op ") + operation.name + "; legal with --op layer and backward");
  }
  check_shape(request.layer.shape, request.layer.ranks);
  request.layer.tokens();
  if (request.launch == Launch::kProcesses && !operation.has_group) {
    refuse_value("--launch", "processes",
                 std::string("threads with --op ") + operation.name + ", which is no rank's call");
  }
  for (const std::string& name : request.only) {
    if (std::find(operation.results.begin(), operation.results.end(), name) != operation.results.end()) continue;
    std::string legal;
    for (const std::string& result : operation.results) legal += (legal.empty() ? "" : ", ") + result;
    refuse_value("--only", name, "some of " + legal);
  }
}

// With a process a rank: what this one, which is not rank 0's, has to do.
BenchOptions without_outputs(BenchOptions options) {
  options.json.clear();
  options.trace.clear();
  return options;
}

void write_report(const BenchOptions& options, const BenchReport& report, OutputFile& json_file) {
  const std::string json = to_json(options.request, options.operation, report).dump(2) + "\n";
  if (options.json == "-") {
    std::cout << json;
    return;
  }
  if (!options.json.empty()) json_file.write(json);
  std::cout << to_table(options.request, options.operation, report);
}

// Where --devices was not given it is no option that is wrong.
void require_gpus(const BenchRequest& request, bool devices_given) {
  if (devices_given) return naming_option("--devices", [&] { BenchGpus::require(request.devices); });
  try {
    BenchGpus::require(request.devices);
  } catch (const Error& error) {
    throw Error(Status::kDevice, fmt::format("no Hopper GPU to measure: {}; `uniep run --repeat N` times the cpu "
                                             "engine, `uniep simulate` a GPU that is not there",
                                             error.what()));
  }
}

// On the cpu engine, too. With a process a rank rank 0's reports, and has the exit status of differing bytes.
int run_online(BenchOptions options) {
  if (options.operation != "layer") refuse_value("--op", options.operation, "layer with --tune online");
  if (!options.trace.empty()) refuse_value("--trace", options.trace, "no timeline with --tune online");
  if (!options.not_online.empty()) {
    throw Error(Status::kInvalidArgument, options.not_online + ": not with --tune online");
  }
  check_shape(options.request.layer.shape, options.request.layer.ranks);
  if (options.request.layer.routing_is_file()) {
    refuse_value("--routing", options.request.layer.routing, "a kind with --tune online: each call has another one");
  }
  BenchRequest& request = options.request;
  request.launch = options.launch.launch;
  if (launched_ranks(options.launch, "uniep bench", request.devices, request.layer)) return 0;
  const bool reports = request.launch == Launch::kThreads || rank_environment()->rank == 0;
  if (!reports) options = without_outputs(options);
  OutputFile json_file("--json", options.json == "-" ? "" : options.json);
  const OnlineReport report = bench_online(options.request, options.online);
  if (!reports) return 0;
  write_report(options.json, json_file, report.json, report.table);
  if (report.differing == 0) return 0;
  throw std::runtime_error(
      fmt::format("--tune online: {} calls have other bytes than sequential execution", report.differing));
}

int run_bench(BenchOptions given) {
  if (given.online.wanted) return run_online(given);
  if (!given.online_only.empty()) {
    throw Error(Status::kInvalidArgument, given.online_only + ": without --tune online");
  }
  const BenchOperation& operation = find_operation(given.operation);
  BenchRequest& request = given.request;
  if (request.sustained_seconds > 0 && given.operation != "gemm") {
    refuse_value("--sustained", fmt::format("{}", request.sustained_seconds), "for --op gemm");
  }
  request.launch = given.launch.launch;
  request.traced = !given.trace.empty();
  if (request.traced && !operation.has_timeline) {
    refuse_value("--trace", given.trace, "for --op layer, backward and step; " + given.operation + " has no timeline");
  }
  check_request(operation, request);
  if (launched_ranks(given.launch, "uniep bench", request.devices, request.layer)) return 0;
  const bool devices_given = !request.devices.empty();
  if (request.launch == Launch::kThreads && !devices_given) request.devices = {0};
  const bool reports = request.launch == Launch::kThreads || rank_environment()->rank == 0;
  const BenchOptions options = reports ? given : without_outputs(given);
  OutputFile trace_file("--trace", options.trace);
  OutputFile json_file("--json", options.json == "-" ? "" : options.json);
  require_gpus(request, devices_given);
  const BenchReport report = operation.run(options.request);
  if (!reports) return 0;
  if (!options.trace.empty()) {
    trace_file.write(trace_json("uniep bench --op " + options.operation + ", " + report.device, report.timeline));
  }
  write_report(options, report, json_file);
  return 0;
}

double parse_seconds(const char* option, const std::string& text) {
  double seconds = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds > 0.0 && seconds <= kMostBenchSeconds)) {
    refuse_value(option, text, "seconds above 0, at most 3600");
  }
  return seconds;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

void add_bench_options(CLI::App& command, BenchOptions& options) {
  BenchRequest& request = options.request;
  request.layer.ranks = 8;
  request.layer.tokens_given = {8192};
  request.layer.shape = {7168, 2048, 256, 8};
  command.add_option("--op", options.operation, operation_descriptions())->type_name(operation_names())->required();
  add_layer_options(command, request.layer);
  add_tuned_options(command, request.layer);
  add_devices_option(command, request.devices,
                     "GPUs that run at once; the slowest counts (default 0; with a process a rank: each its own)");
  add_launch_option(command, options.launch);
  add_integer_option(command, "--repeat", request.repeat, {1, kMostTimedCalls}, {"N", "timed calls"});
  const auto add_seconds = [&command](const char* name, double& seconds, const char* description) {
    add_text_option(
        command, name, [name, &seconds](const std::string& text) { seconds = parse_seconds(name, text); }, "SECONDS",
        description);
  };
  add_seconds("--warm-up", request.warm_up_seconds,
              "the same calls for so long before they count, and layers without a pause: GPUs that were idle run "
              "faster at first");
  add_seconds("--sustained", request.sustained_seconds,
              "then all of it, one call after another, for so long: what is left at the power limit");
  add_text_option(
      command, "--only", [&request](const std::string& text) { request.only = split(text); }, "NAME,...",
      "measure these results only");
  OnlineBench& online = options.online;
  add_word_option<bool>(command, "--tune", online.wanted, {{"off", false}, {"online", true}},
                        "online: steps of layers, each with another routing, that tune themselves; every call is "
                        "compared with sequential execution. On the cpu engine, too; with --launch processes each "
                        "rank has a tuner of its own (default off)");
  add_integer_option(command, "--steps", online.steps, {1, int64_t{1} << 31}, {"N", "of --tune online"});
  add_integer_option(command, "--calls", online.calls, {1, 100'000}, {"N", "layers of such a step"});
  add_text_option(
      command, "--tune-budget",
      [&online](const std::string& text) {
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), online.budget);
        const bool whole = error == std::errc() && end == text.data() + text.size();
        if (!whole || !(online.budget >= 0) || online.budget > 1) refuse_value("--tune-budget", text, "0 to 1");
      },
      "X", "time lost to trying, as a share of the time in the layers (default 0.005)");
  add_text_option(
      command, "--begin",
      [&online](const std::string& text) {
        online.begin = naming_option("--begin", [&] { return PartialSchedule::parse(text); });
      },
      "KEY=VALUE,...", "what --tune online begins with and may leave, unlike --schedule");
  command.add_option("--trace", options.trace, "timeline of one more layer, for Perfetto and `uniep trace`")
      ->type_name("FILE");
  command.add_option("--json", options.json, "report as JSON; -: on standard output")->type_name("FILE|-");
}

}  // namespace

void add_bench_command(CLI::App& app, std::function<int()>& action, const Command& self) {
  CLI::App* command = app.add_subcommand(
      "bench", "Time an operation on GPUs: device events around all device work, L2 cold, the slowest GPU's median");
  const auto options = std::make_shared<BenchOptions>();
  add_bench_options(*command, *options);
  options->launch.self = self;
  command->callback([command, options, &action] {
    options->launch.ranks_given = command->count("--ranks") > 0;
    for (const char* name : {"--steps", "--calls", "--tune-budget", "--begin"}) {
      if (command->count(name) > 0) options->online_only = name;
    }
    for (const char* name : {"--only", "--repeat", "--warm-up", "--sustained", "--tuned", "--tuned-strict"}) {
      if (command->count(name) > 0) options->not_online = name;
    }
    action = [options] { return run_bench(*options); };
  });
}

}  // namespace uniep::cli
