#include "cli/calibrate_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "cli/bench_gpus.h"
#include "cli/calibrate_measure.h"
#include "cli/calibrate_report.h"
#include "cli/calibration_model.h"
#include "cli/layer_options.h"
#include "cli/machine_option.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "cli/solver_choice.h"
#include "engine/cuda/calls/engine.h"
#include "io/cache_folder.h"
#include "io/file.h"
#include "io/quote.h"
#include "tune/calibrated_machine.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

constexpr int kMostRanks = 2;
constexpr double kSecondsOfRank = 40;
constexpr double kLongest[] = {0, 60, 120};  // seconds, by ranks
constexpr double kLongestOfSeconds = 1.5;    // of calls: the same, where these were given
constexpr double kShortestMeasuring = 1, kLongestMeasuring = 600;

struct CalibrateOptions {
  int ranks = 0;  // 0: one for each device
  std::vector<int> devices;
  double seconds = 0;  // 0: by ranks
  std::string base, out, raw, from_raw, json;
  std::vector<std::string> traces;
  bool compile_only = false;
  std::string measuring;  // an option that was given and is of a measuring run alone
  bool measures() const { return from_raw.empty() && traces.empty(); }
};

double parse_seconds(const std::string& text) {
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || !(seconds >= kShortestMeasuring && seconds <= kLongestMeasuring)) {
    refuse_value("--seconds", text, fmt::format("{} to {}", kShortestMeasuring, kLongestMeasuring));
  }
  return seconds;
}

void complete(CalibrateOptions& options) {
  if (options.ranks == 0) options.ranks = std::max<int>(1, static_cast<int>(options.devices.size()));
  if (options.ranks > kMostRanks) {
    refuse_value("--devices", fmt::format("{}", fmt::join(options.devices, ",")), "one or two GPUs");
  }
  if (options.devices.empty()) {
    for (int device = 0; device < options.ranks; ++device) options.devices.push_back(device);
  }
  const bool different = options.devices.size() < 2 || options.devices[0] != options.devices[1];
  if (static_cast<int>(options.devices.size()) != options.ranks || !different) {
    refuse_value("--devices", fmt::format("{}", fmt::join(options.devices, ",")),
                 fmt::format("{} GPU{} that differ, one for each rank", options.ranks, options.ranks > 1 ? "s" : ""));
  }
  if (options.seconds == 0) options.seconds = kSecondsOfRank * options.ranks;
}

void require_gpus(const CalibrateOptions& options) {
  try {
    BenchGpus::require(options.devices);
  } catch (const Error& error) {
    throw Error(Status::kDevice, fmt::format("no Hopper GPU to measure: {}; --from-raw FILE fits what was measured "
                                             "elsewhere",
                                             error.what()));
  }
}

void say(const std::string& line) {
  std::cerr << "uniep calibrate: " << line << '\n' << std::flush;
}

tune::Calibration measured(const CalibrateOptions& options) {
  const std::vector<tune::CalibrationLayer> layers = tune::calibration_layers(options.ranks);
  say(fmt::format("{} layers on {}; compiling what is not in the cache yet", layers.size(),
                  cuda::device_label(options.devices.front())));
  say(fmt::format("{} kernels are ready", compile_layers(layers, kHopperSms)));
  MeasureRequest request;
  request.devices = options.devices;
  request.seconds = options.seconds;
  request.longest = std::max(kLongest[options.ranks], kLongestOfSeconds * options.seconds);
  request.progress = say;
  KeptFile raw(options.raw, say);
  if (!options.raw.empty()) request.keep = [&](const tune::Calibration& so_far) { raw.keep(tune::to_json(so_far)); };
  return measure_layers(layers, request);
}

sim::MachineDescription base_of(const CalibrateOptions& options, const std::string& device) {
  if (!options.base.empty()) return load_machine(options.base, "--base");
  const sim::MachineDescription* const known = sim::machine_of_device(device);
  return known != nullptr ? *known : sim::shipped_machine(sim::kDefaultMachine);
}

// Where auto finds it, unless told otherwise; what was measured is reported even where that can not be written.
std::string written(const CalibrateOptions& options, OutputFile& out, const std::string& device,
                    const std::string& description) {
  if (!options.out.empty()) {
    out.write(description);
    return options.out;
  }
  const std::filesystem::path file = options.measures() ? tune::calibrated_file(device) : std::filesystem::path();
  if (file.empty()) return "";
  try {
    make_cache_folder(file.parent_path());
    io::write_file(file, description);
    return file.string();
  } catch (const Error& error) {
    say(fmt::format("warning: {}", error.what()));
    return "";
  }
}

std::exception_ptr try_to_write(OutputFile& file, const std::string& text) {
  try {
    file.write(text);
    return nullptr;
  } catch (const Error&) {
    return std::current_exception();
  }
}

tune::Calibration read_raw(const CalibrateOptions& options) {
  return naming_option("--from-raw",
                       [&] { return tune::parse_calibration(io::read_text_file(options.from_raw), options.from_raw); });
}

// Of --traces; beside the layers of --from-raw they have to be of the same GPU, which `calibration` gets where there
// are no layers.
std::vector<TimelineCall> read_traces(const CalibrateOptions& options, tune::Calibration& calibration) {
  std::vector<TimelineCall> calls = naming_option("--traces", [&] { return read_timelines(options.traces); });
  const TracedMachine& machine = calls.front().run.machine;
  if (options.from_raw.empty()) {
    calibration.device = machine.device;
    calibration.compute_units = machine.compute_units;
  } else if (calibration.device != machine.device || calibration.compute_units != machine.compute_units) {
    throw Error(Status::kInvalidArgument,
                fmt::format("--traces: {} is of {} with {} compute units, and --from-raw of {} with {}; must be of one "
                            "kind of GPU",
                            io::quote_path(calls.front().file), io::quote_text(machine.device), machine.compute_units,
                            io::quote_text(calibration.device), calibration.compute_units));
  }
  return calls;
}

int run_calibrate(CalibrateOptions options) {
  const auto begin = std::chrono::steady_clock::now();
  const char* const given = !options.traces.empty() ? "--traces" : !options.from_raw.empty() ? "--from-raw" : nullptr;
  if (given != nullptr && !options.measuring.empty()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("{}: nothing is measured with {}; must be left out", options.measuring, given));
  }
  complete(options);
  tune::Calibration calibration;
  if (!options.from_raw.empty()) calibration = read_raw(options);
  std::vector<TimelineCall> calls;
  if (!options.traces.empty()) calls = read_traces(options, calibration);
  if (options.compile_only) {
    const std::vector<tune::CalibrationLayer> layers = tune::calibration_layers(options.ranks);
    std::cout << fmt::format("{} kernels are in the cache\n", compile_layers(layers, kHopperSms));
    return 0;
  }
  if (!options.base.empty()) base_of(options, "");  // before anything is measured
  OutputFile json_file("--json", options.json == "-" ? "" : options.json);
  OutputFile raw_file("--raw", options.raw);
  OutputFile out_file("--out", options.out);
  if (options.measures()) {
    require_gpus(options);
    calibration = measured(options);
  }
  std::exception_ptr not_written;  // an error once all else is: measuring took a minute
  if (options.measures() && !options.raw.empty()) not_written = try_to_write(raw_file, tune::to_json(calibration));
  const sim::MachineDescription base = base_for(base_of(options, calibration.device), calibration);
  const CalibrationModel model(calibration.layers, base);
  std::optional<TimelineModel> timelines;
  if (!calls.empty()) naming_option("--traces", [&] { timelines.emplace(std::move(calls), base); });
  const TimelineModel* const with = timelines ? &*timelines : nullptr;
  const Calibrated calibrated = naming_option(options.measures() ? "--base"
                                              : with != nullptr  ? "--traces"
                                                                 : "--from-raw",
                                              [&] { return calibrated_machine(calibration, model, base, 0, with); });
  const std::string out = written(options, out_file, calibration.device, sim::machine_json(calibrated.machine));
  if (!calibrated.doubtful.empty()) {
    say(
        fmt::format("warning: the measurement disagrees with itself by {:.0f} % on the layers' times, and by more than "
                    "{:.0f} % on {}; --schedule auto will not use it; run again while nothing else uses the GPU",
                    100 * calibrated.fit.disagreement, 100 * kMostSpread, fmt::join(calibrated.doubtful, ", ")));
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const CalibrateReport report{calibration, model, calibrated, base.name, out, seconds, with};
  write_report(options.json, json_file, calibrate_json(report), calibrate_table(report));
  if (not_written) std::rethrow_exception(not_written);
  return 0;
}

}  // namespace

void add_calibrate_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command = app.add_subcommand(
      "calibrate", "Measure the GPUs of this machine, and write a machine description for simulate, solve and auto");
  const auto options = std::make_shared<CalibrateOptions>();
  add_text_option(
      *command, "--ranks",
      [options](const std::string& text) {
        options->ranks = static_cast<int>(parse_integer("--ranks", text, 1, kMostRanks));
      },
      "N", "GPUs: 1, or 2 for links, too (default as many as --devices)");
  add_devices_option(*command, options->devices, "which GPUs (default 0, and 1 with two ranks)");
  add_text_option(
      *command, "--seconds", [options](const std::string& text) { options->seconds = parse_seconds(text); }, "S",
      fmt::format("of calls, warm-up with them (default {} a rank)", kSecondsOfRank));
  command
      ->add_option("--base", options->base,
                   "machine that numbers start from and stay near (default the GPU's kind, else h200)")
      ->type_name("NAME|FILE");
  command
      ->add_option("--out", options->out,
                   "the description (default of what is measured here: in the cache folder, where auto finds it)")
      ->type_name("FILE");
  command->add_option("--raw", options->raw, "all times that were measured")->type_name("FILE");
  command->add_option("--from-raw", options->from_raw, "fit what --raw wrote; needs no GPU")->type_name("FILE");
  command
      ->add_option(
          "--traces", options->traces,
          "fit timelines of `uniep run --trace` and `uniep bench --trace`, alone or with --from-raw; needs no GPU")
      ->type_name("FILE");
  command->add_flag("--compile-only", options->compile_only, "fill the cache with the kernels; needs no GPU");
  command->add_option("--json", options->json, "report as JSON; -: on standard output")->type_name("FILE|-");
  command->callback([command, options, &action] {
    for (const char* name : {"--ranks", "--devices", "--seconds", "--raw", "--compile-only"}) {
      if (command->count(name) > 0) options->measuring = name;
    }
    action = [options] { return run_calibrate(*options); };
  });
}

}  // namespace uniep::cli
