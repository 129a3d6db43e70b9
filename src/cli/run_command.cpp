#include "cli/run_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "cli/chosen_schedule.h"
#include "cli/launch_options.h"
#include "cli/layer_inputs.h"
#include "cli/layer_options.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "cli/run_outputs.h"
#include "cli/run_report.h"
#include "cli/sequential_run.h"
#include "cli/trace_file.h"
#include "cli/traced_run.h"
#include "engine/engine.h"
#include "io/json_text.h"
#include "model/place.h"

namespace uniep::cli {
namespace {

struct RunOptions {
  LayerOptions layer;
  InputFiles files;
  std::vector<int> devices;
  LaunchOptions launch;
  bool backward = false;
  int64_t capacity = 0;
  bool check = false;
  bool compare = false;  // with the sequential run
  bool verbose = false;
  int repeat = 0;  // 0: one run and no warm-up
  uint64_t shuffle = 0;
  std::string trace, json, out;
};

constexpr int kMaxRepeats = 1'000'000;
constexpr int kComparedCalls = 5;

// This process's ranks; all of them where their results are checked.
RankRange held_ranks(const RunOptions& options, const Group& group) {
  if (options.check) return {0, group.ranks()};
  return {group.first_local_rank(), group.local_ranks()};
}

reference::CheckReport check_result(const RunOptions& options, const LayerData& data, const LayerResult& result) {
  const WeightGradient mode = options.layer.numerics.weight_gradient;
  const BFloat16 no_rows{};
  reference::LayerInput input;
  input.shape = data.shape;
  input.numerics = options.layer.numerics;
  input.tokens = data.all_tokens();
  input.x = data.x.data();
  if (options.backward) input.dy = data.dy.empty() ? &no_rows : data.dy.data();
  input.ids = data.ids.data();
  input.probs = data.probs.data();
  input.w1 = data.w1.data();
  input.w2 = data.w2.data();
  input.b1 = data.b1.data();
  input.b2 = data.b2.data();

  reference::EngineOutput got;
  got.y = result.y.data();
  got.z = result.z.data();
  const bool bias = options.layer.numerics.bias;
  if (options.backward) {
    got.dx = result.dx.data();
    got.dprobs = result.dprobs.data();
    got.weight_gradient = mode;
    got.dw1 = result.dw1_bf16.data();
    got.dw2 = result.dw2_bf16.data();
    if (bias) got.db1 = result.db1_bf16.data();
    if (bias) got.db2 = result.db2_bf16.data();
    if (mode != WeightGradient::kBFloat16) {
      got.dw1 = result.dw1_fp32.data();
      got.dw2 = result.dw2_fp32.data();
      if (bias) got.db1 = result.db1_fp32.data();
      if (bias) got.db2 = result.db2_fp32.data();
    }
    got.main_grad = start_main_grad;
  }
  reference::CheckOptions check;
  check.seed = options.layer.seed;
  return reference::check(input, got, check);
}

std::string trace_title(const RunReport& report) {
  const LayerShape& shape = report.config.shape;
  const char* const kFusions[] = {"none", "pairs", "layer"};
  return fmt::format("uniep {}: {} ranks x {} workers, H {}, I {}, E {}, K {}, fusion={}", engine_name(report.engine),
                     report.ranks, report.workers, shape.hidden, shape.intermediate, shape.experts, shape.topk,
                     kFusions[static_cast<int>(report.schedules.forward.fusion)]);
}

// The same calls once more, sequentially: their times, and which tensors got other bits.
SequentialReport run_sequentially(const RunOptions& options, const Group& group, LayerRunner& runner,
                                  const LayerSchedules& schedules, const LayerResult& result) {
  SequentialReport report;
  report.schedules = sequential_schedules(schedules, options.layer.config(), group.machine());
  report.times = time_calls(runner, report.schedules, options.repeat);
  report.differing = result.differences(runner.result());
  return report;
}

void throw_failures(const RunReport& report) {
  if (report.check && !report.check->passed()) throw std::runtime_error("--check: " + failed_checks(*report.check));
  if (!report.sequential || report.sequential->differing.empty()) return;
  throw std::runtime_error(
      fmt::format("--compare: {} of the sequential run differ", fmt::join(report.sequential->differing, ", ")));
}

// With a process a rank: what this one, which is not rank 0's, has to do. The results are rank 0's to write.
RunOptions without_outputs(RunOptions options) {
  options.check = false;
  options.json.clear();
  options.out.clear();
  return options;
}

RunReport new_report(const RunOptions& options, Group& group) {
  RunReport report;
  report.engine = group.engine();
  report.ranks = group.ranks();
  report.workers = group.workers();
  report.config = options.layer.config();
  report.schedules.forward = chosen_schedule(options.layer, Direction::kForward, group);
  if (options.backward) report.schedules.backward = chosen_schedule(options.layer, Direction::kBackward, group);
  for (const auto& [name, value] : options.layer.schedule.values()) {
    report.given_fields += fmt::format("{}{}={}", report.given_fields.empty() ? "" : ",", name, value);
  }
  return report;
}

RunnerOptions runner_options(const RunOptions& options, const LayerData& data) {
  if (options.capacity == 0) return {};
  const int64_t most_tokens = *std::max_element(data.tokens.begin(), data.tokens.end());
  return {.capacity = {.rows = options.capacity, .tokens = std::max<int64_t>(most_tokens, 1)}};
}

void note_placement(const RunOptions& options, const LayerData& data, const Group& group, const Placement& placement,
                    RunReport& report) {
  report.tokens = data.tokens;
  for (int rank = 0; rank < report.ranks; ++rank) report.rows_per_rank.push_back(placement.rows(rank));
  // On GPUs the slots' experts stay there.
  const Placement on_host = group.engine() == EngineKind::kCuda ? place_ids(options.layer, data.ids) : placement;
  report.bytes = bytes_moved(on_host, report.schedules.forward, report.config.numerics);
}

void open_tensors(const RunOptions& options, const RunReport& report, const LayerData& data,
                  std::optional<OutputTensors>& file) {
  if (options.out.empty()) return;
  const bool has_z = report.schedules.forward.save_z == SaveZ::kKeep;
  const int64_t rows =
      has_z ? std::accumulate(report.rows_per_rank.begin(), report.rows_per_rank.end(), int64_t{0}) : kNoZ;
  naming_option("--out", [&] { file.emplace(options.out, report.config, data.all_tokens(), rows, options.backward); });
}

int run_group(const RunOptions& given) {
  Group group = make_group(given.layer, given.devices, given.launch.launch);
  group.implementation().disturb({.shuffle_seed = given.shuffle});
  const bool reports = group.first_local_rank() == 0;
  const RunOptions options = reports ? given : without_outputs(given);
  OutputFile trace_file("--trace", reports ? options.trace : "");
  OutputFile json_file("--json", options.json == "-" ? "" : options.json);

  RunReport report = new_report(options, group);
  const LayerData data =
      make_layer_data(options.layer, options.files, options.backward, held_ranks(options, group), options.capacity);
  LayerRunner runner(group, report.config, data, runner_options(options, data));
  note_placement(options, data, group, runner.placement(), report);
  std::optional<OutputTensors> out_file;
  open_tensors(options, report, data, out_file);

  std::vector<TracedCall> traced;
  report.times = time_calls(runner, report.schedules, options.repeat, options.trace.empty() ? nullptr : &traced);
  const LayerResult result = runner.result();
  if (options.compare) report.sequential = run_sequentially(options, group, runner, report.schedules, result);
  if (!reports) return 0;
  report.checksums = checksums_of(result, options.backward);
  if (out_file) naming_option("--out", [&] { out_file->write(result); });
  for (TracedCall& call : traced) {
    const LayerSchedules& made = report.schedules;
    const Schedule& schedule = call.name == "backward" ? *made.backward : made.forward;
    call.layer = traced_layer(options.layer, schedule, traced_machine(group));
  }
  if (!options.trace.empty()) trace_file.write(trace_json(trace_title(report), traced));
  if (options.check) report.check = check_result(options, data, result);
  write_report(options.json, json_file, io::json_text(to_json(report), 2) + "\n", to_table(report, options.verbose));
  throw_failures(report);
  return 0;
}

int run(RunOptions options) {
  if (launched_ranks(options.launch, "uniep run", options.devices, options.layer)) return 0;
  if (options.compare && options.repeat == 0) options.repeat = kComparedCalls;
  return run_group(options);
}

void add_run_options(CLI::App& command, RunOptions& options) {
  add_layer_options(command, options.layer);
  add_tuned_options(command, options.layer);
  command.add_option("--probs", options.files.probs, "router weights, float32 [sum T, K]")->type_name("FILE.npy");
  command
      .add_option("--tensors", options.files.tensors, "any of x, dy, probs, w1, w2, b1 and b2; the rest is synthetic")
      ->type_name("FILE.safetensors");
  add_devices_option(command, options.devices, "GPUs: rank r runs on entry r mod the length");
  add_launch_option(command, options.launch);
  command.add_flag("--backward", options.backward, "run backward, too");
  add_integer_option(command, "--capacity", options.capacity, {0, kMaxPlacedRows},
                     {"ROWS", "padded rows that a rank has room for; 0: as many as it needs"});
  command.add_flag("--check", options.check, "compare with a float64 reference; a failure is exit status 1");
  add_text_option(
      command, "--compare",
      [&options](const std::string& text) {
        if (text != "sequential") refuse_value("--compare", text, "sequential");
        options.compare = true;
      },
      "sequential",
      "run it again with fusion=none: both times (of 5 calls, unless --repeat says how many), and whether the bits are "
      "the same");
  add_text_option(
      command, "--repeat",
      [&options](const std::string& text) {
        options.repeat = static_cast<int>(parse_integer("--repeat", text, 1, kMaxRepeats));
      },
      "N", "timed runs after a warm-up (default one run, without a warm-up)");
  add_text_option(
      command, "--shuffle",
      [&options](const std::string& text) { options.shuffle = parse_unsigned("--shuffle", text, 1); }, "SEED",
      "disturb the order and timing of tiles; changes no result");
  command.add_flag("--verbose", options.verbose, "print whole schedules");
  command.add_option("--trace", options.trace, "timeline of the last run, for Perfetto and `uniep trace`")
      ->type_name("FILE");
  command.add_option("--json", options.json, "report as JSON; -: on standard output")->type_name("FILE|-");
  command.add_option("--out", options.out, "y, z and with --backward dx, dprobs, dw1, dw2, db1, db2")
      ->type_name("FILE.safetensors");
}

}  // namespace

void add_run_command(CLI::App& app, std::function<int()>& action, const Command& self) {
  CLI::App* command = app.add_subcommand("run", "Run one layer: forward, and backward with --backward");
  const auto options = std::make_shared<RunOptions>();
  add_run_options(*command, *options);
  options->launch.self = self;
  command->callback([command, options, &action] {
    options->launch.ranks_given = command->count("--ranks") > 0;
    action = [options] { return run(*options); };
  });
}

}  // namespace uniep::cli
