#include "cli/train_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "api/machine_name.h"
#include "cli/chosen_schedule.h"
#include "cli/device_arrays.h"
#include "cli/layer_options.h"
#include "cli/options.h"
#include "io/file.h"
#include "io/json_text.h"
#include "io/quote.h"
#include "model/refuse.h"
#include "train/checkpoint.h"
#include "train/compare.h"
#include "train/progress.h"
#include "train/report.h"

namespace uniep::cli {
namespace {

using namespace train;

struct TrainOptions {
  std::vector<std::string> text;
  TrainConfig config;
  ParallelConfig parallel;
  PartialSchedule backward_overrides;
  SaveWay save = SaveWay::kAsScheduled;
  int64_t steps = 150;
  int64_t evaluate_every = 50;
  bool compare = false;
  std::string json;
  std::string checkpoint;
  int64_t checkpoint_every = 0;
  std::string resume;
  bool budget_given = false;
};

double parse_number(const std::string& option, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) refuse_value(option, text, "a number");
  return value;
}

// A file to write: found out at the start, not after an hour of training.
void check_writable(const char* option, const std::string& file) {
  if (file.empty() || file == "-") return;
  const std::filesystem::path path(file);
  std::error_code ignored;
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (!std::filesystem::is_directory(folder, ignored)) {
    refuse(fmt::format("{}: {} is in no folder that exists", option, io::quote_path(file)));
  }
  if (std::filesystem::is_directory(path, ignored))
    refuse(fmt::format("{}: {} is a folder", option, io::quote_path(file)));
  if (std::filesystem::is_fifo(path, ignored)) return;  // opening it would be seen at its other end
  naming_option(option, [&] { const io::AtomicFile discarded(path); });
}

void check_options(const TrainOptions& options) {
  const TuneConfig& tune = options.parallel.tune;
  if (!tune.online && (tune.until > 0 || options.budget_given)) {
    refuse(fmt::format("{}: without --tune online", tune.until > 0 ? "--tune-until" : "--tune-budget"));
  }
  if (!(tune.budget >= 0) || tune.budget > 1) refuse(fmt::format("--tune-budget: {}; legal are 0 to 1", tune.budget));
  check(options.config, options.parallel);
  check_writable("--json", options.json);
  check_writable("--checkpoint", options.checkpoint);
  if (options.checkpoint_every > 0 && options.checkpoint.empty()) {
    refuse(fmt::format("--checkpoint-every: {} without --checkpoint FILE; name the file to write",
                       options.checkpoint_every));
  }
}

Text load_text(const TrainOptions& options) {
  std::vector<std::filesystem::path> files(options.text.begin(), options.text.end());
  Text text = train::load_text(files.empty() ? default_text_files() : files);
  text.check_window(options.config.model.sequence);
  return text;
}

RunRecord run(const std::string& name, const TrainOptions& options, Trainer& trainer, const Text* checkpoint_text) {
  Progress progress(name, trainer.steps_done(), options.steps);
  RunPlan plan;
  plan.steps = options.steps;
  plan.evaluate_every = options.evaluate_every;
  plan.on_step = [&](const StepRecord& step) { progress.show(step); };
  plan.on_evaluation = [&](const EvaluationRecord& evaluation) { progress.show(evaluation); };
  if (checkpoint_text != nullptr && !options.checkpoint.empty()) {
    plan.after_step = [&options, checkpoint_text](const Trainer& now) {
      const bool due = options.checkpoint_every > 0 && now.steps_done() % options.checkpoint_every == 0;
      if (!due && now.steps_done() != options.steps) return;
      naming_option("--checkpoint", [&] {
        save_checkpoint(options.checkpoint, now.state(), now.layout(), now.config(), *checkpoint_text);
      });
    };
  }
  return train::train(trainer, plan);
}

struct FinishedRun {
  const RunRecord& record;
  const Trainer& trainer;
};

// The same training with every stage a launch of its own, on `ranks` ranks, from the same start.
Comparison compare_sequential(const TrainOptions& options, int ranks, const Text& text, const TrainState& start,
                              const FinishedRun& finished) {
  ParallelConfig sequential;
  sequential.engine = options.parallel.engine;
  sequential.devices = options.parallel.devices;
  sequential.ranks = ranks;
  sequential.workers = options.parallel.workers;
  sequential.device_arrays = options.parallel.device_arrays;
  sequential.schedule = PartialSchedule::parse("fusion=none");
  sequential.schedule_backward = sequential.schedule;
  Trainer other(options.config, sequential, text);
  other.restore(start);
  const std::string name = fmt::format("fusion=none on {} rank{}", ranks, ranks == 1 ? "" : "s");
  const RunRecord other_record = run(name, options, other, nullptr);
  return {name, ranks,
          first_difference(finished.record, finished.trainer.parameters(), other_record, other.parameters())};
}

void write_outputs(const TrainOptions& options, const Report& report, const Trainer& trainer, const Text& text) {
  if (options.json != "-") std::cout << train::to_text(report, trainer, text);
  if (options.json.empty()) return;
  const std::string json = io::json_text(train::to_json(report, trainer, text), 1) + "\n";
  if (options.json == "-") {
    std::cout << json;
  } else {
    naming_option("--json", [&] { io::write_file(options.json, json); });
  }
}

// Engines differ in their last bits.
void check_engine(const std::string& resumed, const TrainState& state, const Trainer& trainer) {
  const EngineKind own = trainer.experts().group().engine();
  if (state.engine == EngineKind::kAuto || state.engine == own) return;
  refuse(fmt::format("--resume: {} was trained with --engine {}; this run has {}", io::quote_path(resumed),
                     engine_name(state.engine), engine_name(own)));
}

int run_training(TrainOptions options) {
  options.parallel.device_arrays = &device_arrays();
  options.parallel.schedule_backward = options.parallel.schedule;
  for (const auto& [field, value] : options.backward_overrides.values()) {
    options.parallel.schedule_backward.set(field, value);
  }
  set_saves(options.parallel.schedule, options.save);
  set_saves(options.parallel.schedule_backward, options.save);
  check_options(options);
  const Text text = load_text(options);
  Trainer trainer(options.config, options.parallel, text);
  if (!options.resume.empty()) {
    TrainState state = load_checkpoint(options.resume, trainer.layout(), options.config, text);
    check_engine(options.resume, state, trainer);
    trainer.restore(std::move(state));
    if (trainer.steps_done() >= options.steps) {
      refuse(fmt::format("--steps: {}; {} has {} steps behind it already, more are needed to go on", options.steps,
                         io::quote_path(options.resume), trainer.steps_done()));
    }
  }
  const std::optional<TrainState> start = options.compare ? std::optional(trainer.state()) : std::nullopt;
  Report report;
  report.first_step = trainer.steps_done();
  report.last_step = options.steps;
  report.record = run(fmt::format("{} rank{}", options.parallel.ranks, options.parallel.ranks == 1 ? "" : "s"), options,
                      trainer, &text);
  if (start) {
    report.comparisons.push_back(
        compare_sequential(options, options.parallel.ranks, text, *start, {report.record, trainer}));
    if (options.parallel.ranks > 1) {
      report.comparisons.push_back(compare_sequential(options, 1, text, *start, {report.record, trainer}));
    }
  }
  write_outputs(options, report, trainer, text);
  for (const Comparison& comparison : report.comparisons) {
    if (comparison.difference.empty()) continue;
    std::cerr << fmt::format("uniep train: {}: {}\n", comparison.name, comparison.difference);
  }
  if (options.parallel.verify_every > 0) {
    std::cerr << fmt::format("--verify: {} checks, {} findings\n", trainer.experts().checks(),
                             trainer.findings().size());
    for (const std::string& message : trainer.findings()) std::cerr << message << "\n";
    if (!trainer.findings().empty()) return 1;
  }
  return report.all_equal() ? 0 : 1;
}

void add_model_options(CLI::App& app, TrainConfig& config) {
  constexpr int64_t kMax = int64_t{1} << 31;
  ModelConfig& model = config.model;
  add_integer_option(app, "--batch", config.batch, {1, kMax}, {"B", "sequences of a step, over all ranks"});
  add_integer_option(app, "--sequence", model.sequence, {1, kMax}, {"S", "bytes of a sequence"});
  add_integer_option(app, "--hidden", model.hidden, {1, kMax}, {"H", "width of the model, a multiple of 8"});
  add_integer_option(app, "--intermediate", model.intermediate, {1, kMax},
                     {"I", "width of an expert, a multiple of 8"});
  add_integer_option(app, "--experts", model.experts, {1, kMax}, {"E", "experts of a layer, over all ranks"});
  add_integer_option(app, "--topk", model.topk, {1, kMax}, {"K", "experts that a byte goes to"});
  add_activation_options(app, model.numerics);
  add_integer_option(app, "--layers", model.layers, {1, kMax}, {"L", "blocks of mixer and MoE layer"});
  const auto add_number = [&app](const std::string& name, double& value, const std::string& description) {
    add_text_option(
        app, name, [&value, name](const std::string& text) { value = parse_number(name, text); }, "X",
        fmt::format("{} (default {})", description, value));
  };
  add_number("--learning-rate", config.learning_rate, "AdamW's, after a warm-up of 10 steps");
  add_number("--balance-weight", config.balance_weight, "weight of the load-balancing loss");
  add_text_option(
      app, "--seed", [&config](const std::string& text) { config.seed = parse_unsigned("--seed", text, 0); }, "N",
      fmt::format("of the initial weights and of the text windows (default {})", config.seed));
}

void add_parallel_options(CLI::App& app, TrainOptions& options) {
  add_integer_option(app, "--verify", options.parallel.verify_every, {0, int64_t{1} << 31},
                     {"N", "check a layer every N steps, 0: none; a finding is exit status 1"});
  add_word_option<EngineKind>(app, "--engine", options.parallel.engine,
                              {{"cpu", EngineKind::kCpu}, {"cuda", EngineKind::kCuda}, {"auto", EngineKind::kAuto}},
                              "of the MoE layers (default cpu); auto: cuda where a Hopper GPU is, else cpu");
  add_devices_option(app, options.parallel.devices, "GPUs: rank r runs on entry r mod the length");
  add_integer_option(app, "--ranks", options.parallel.ranks, {1, 64}, {"R", "ranks that the experts are spread over"});
  add_integer_option(app, "--workers", options.parallel.workers, {0, 1024},
                     {"N", "compute units of a rank, 0: as many as fit"});
  add_text_option(
      app, "--schedule",
      [&options](const std::string& text) { options.parallel.schedule = read_schedule("--schedule", text); },
      "auto|FILE|key=value,...", "schedule of both directions; what is not given is filled (default auto)");
  add_text_option(
      app, "--schedule-backward",
      [&options](const std::string& text) { options.backward_overrides = read_schedule("--schedule-backward", text); },
      "auto|FILE|key=value,...", "fields that backward has instead of --schedule's");
  add_save_option(app, options.save);
}

void add_tuning_options(CLI::App& app, TrainOptions& options) {
  TuneConfig& tune = options.parallel.tune;
  tune.folder = tuned_folder().path().string();
  tune.machine_name = api::machine_name;
  add_word_option<bool>(app, "--tune", tune.online, {{"off", false}, {"online", true}},
                        "online: try other schedules of the MoE layers while training (default off)");
  add_text_option(
      app, "--tune-budget",
      [&options](const std::string& text) {
        options.parallel.tune.budget = parse_number("--tune-budget", text);
        options.budget_given = true;
      },
      "X", fmt::format("time lost to trying, as a share of the time in the layers (default {})", tune.budget));
  add_integer_option(app, "--tune-until", tune.until, {0, int64_t{1} << 31},
                     {"STEP", "the schedules of this step stay, 0: of none"});
}

}  // namespace

void add_train_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command = app.add_subcommand("train", "Trains a small byte-level MoE language model on text.");
  const auto options = std::make_shared<TrainOptions>();
  options->parallel.ranks = 4;
  command
      ->add_option("--text", options->text, "text files; a tenth of each is held out (default: Debian's licence texts)")
      ->type_name("FILE...");
  add_integer_option(*command, "--steps", options->steps, {1, int64_t{1} << 31}, {"N", "step to train up to"});
  add_integer_option(*command, "--evaluate-every", options->evaluate_every, {0, int64_t{1} << 31},
                     {"N", "steps between evaluations on the held-out text, 0: at both ends only"});
  add_model_options(*command, options->config);
  add_parallel_options(*command, *options);
  add_tuning_options(*command, *options);
  add_text_option(
      *command, "--compare",
      [options](const std::string& text) {
        if (text != "sequential") refuse_value("--compare", text, "sequential");
        options->compare = true;
      },
      "sequential", "train again with fusion=none, and on one rank, and compare every bit");
  command->add_option("--json", options->json, "write the log as JSON; -: to standard output, with nothing else there")
      ->type_name("FILE|-");
  command->add_option("--checkpoint", options->checkpoint, "write a checkpoint after the last step")->type_name("FILE");
  add_integer_option(*command, "--checkpoint-every", options->checkpoint_every, {0, int64_t{1} << 31},
                     {"N", "and every N steps, 0: not"});
  command->add_option("--resume", options->resume, "go on from a checkpoint, with the same bits")->type_name("FILE");
  command->callback([options, &action] { action = [options] { return run_training(*options); }; });
}

}  // namespace uniep::cli
