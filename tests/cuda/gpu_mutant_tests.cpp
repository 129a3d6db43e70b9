// Faults planted into the kernels (kernel_mutants.h), one at a time: whether the layer that should tell of one does, by
// other bytes or by a wait that runs out. Calls with the batches of two seeds take turns, in poisoned memory, with
// delays in the kernels, beside copies in the GPUs' memory (memory_traffic.h). First the layers run as they are, and
// must give the right bytes. Usage: gpu_mutant_tests
//     [--only NAME[,NAME...]] [--first N] [--count N] [--devices D] [--seconds S] [--limit S] [--seed N]
//     [--no-traffic] [--results FILE] [--compile THREADS] [--list]
// D: how many GPUs the four ranks are dealt over (default 1); faults that need more are left out. --seconds (default
// 6): how long a fault's layer runs; --limit (default 15): when its process is killed, which counts as a time-out.
// --results: lines are added to FILE, and what has a line there is left out, so that a run can be taken up again.
// --compile puts the kernels into the cache, needs no GPU, and ends; else they are compiled first, on all cores.
// --list prints the faults and ends. --run NAME: this process is the one that runs NAME.
// Exit status 1 where a fault survived that should not, or a layer was wrong as it is; 77 without a Hopper GPU.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "engine/cuda/kernels/exchange.h"
#include "engine/cuda/kernels/gemm_kernels.h"
#include "engine/cuda/kernels/place_kernels.h"
#include "support/disturb.h"
#include "tests/cuda/disturbed_calls.h"
#include "tests/cuda/kernel_mutants.h"
#include "tests/cuda/layer_oracle.h"
#include "tests/cuda/memory_traffic.h"
#include "tests/cuda/mutant_layers.h"
#include "tests/cuda/queued_calls.h"
#include "tests/cuda/rank_processes.h"

namespace uniep::cuda::test {
namespace {

struct Options {
  std::vector<std::string> only;
  int first = 0, count = 1 << 30;
  int devices = 1;
  double seconds = 6, limit = 15;
  uint64_t seed = 1;
  std::string results;
  int compile_threads = 0;
  bool list = false, traffic = true;
  std::string run, compile;  // of a process that was started for one name
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--only") options.only = split(value(), ',');
    if (name == "--first") options.first = std::atoi(value().c_str());
    if (name == "--count") options.count = std::atoi(value().c_str());
    if (name == "--devices") options.devices = std::max(1, std::atoi(value().c_str()));
    if (name == "--seconds") options.seconds = std::atof(value().c_str());
    if (name == "--limit") options.limit = std::atof(value().c_str());
    if (name == "--seed") options.seed = std::strtoull(value().c_str(), nullptr, 10);
    if (name == "--results") options.results = value();
    if (name == "--compile") options.compile_threads = std::max(1, std::atoi(value().c_str()));
    if (name == "--list") options.list = true;
    if (name == "--no-traffic") options.traffic = false;
    if (name == "--run") options.run = value();
    if (name == "--compile-one") options.compile = value();
  }
  return options;
}

// The layers as they are are run by the names unmutated-LAYER.
const std::string kUnmutated = "unmutated-";

struct Subject {
  std::string name, layer;
  const KernelMutant* mutant = nullptr;  // null: the layer as it is
};

Subject find_subject(const std::string& name) {
  if (name.starts_with(kUnmutated)) return {name, name.substr(kUnmutated.size())};
  const KernelMutant& mutant = find_mutant(name);
  return {name, mutant.layer, &mutant};
}

// Those that the options choose, behind the layers as they are.
std::vector<Subject> chosen(const Options& options) {
  std::vector<Subject> mutants, all;
  int index = 0;
  for (const KernelMutant& mutant : kernel_mutants()) {
    const bool named =
        options.only.empty() || std::find(options.only.begin(), options.only.end(), mutant.name) != options.only.end();
    if (!named || mutant.gpus > options.devices || mutant.is_equivalent()) continue;
    if (index >= options.first && index < options.first + options.count) {
      mutants.push_back({mutant.name, mutant.layer, &mutant});
    }
    ++index;
  }
  std::set<std::string> layers;
  for (const Subject& subject : mutants) layers.insert(subject.layer);
  for (const std::string& layer : layers) all.push_back({kUnmutated + layer, layer});
  all.insert(all.end(), mutants.begin(), mutants.end());
  return all;
}

KernelVariant variant_of(const Subject& subject) {
  return subject.mutant == nullptr ? disturbed_kernels() : variant_of(*subject.mutant);
}

enum class Fate : int { kSurvived = 0, kBytes = 10, kTimeout = 11, kError = 12, kBroken = 1 };

const char* to_text(Fate fate) {
  switch (fate) {
    case Fate::kSurvived:
      return "survived";
    case Fate::kBytes:
      return "killed by bytes";
    case Fate::kTimeout:
      return "killed by time-out";
    case Fate::kError:
      return "killed by an error";
    default:
      return "could not run";
  }
}

bool is_killed(Fate fate) {
  return fate == Fate::kBytes || fate == Fate::kTimeout || fate == Fate::kError;
}

float main_grad(uint64_t index) {
  return static_cast<float>(index % 61) - 30.0f;
}

// One of the batches that take turns, and what it has to give.
struct Batch {
  cli::LayerData data;
  cli::LayerResult expected;
};

GroupOptions group_options(const MutantLayer& layer, const Options& options) {
  GroupOptions given;
  given.engine = EngineKind::kCuda;
  given.ranks = layer.how.ranks;
  given.workers = layer.how.workers;
  for (int device = 0; device < options.devices; ++device) given.devices.push_back(device);
  given.timeout_seconds = given.arrival_timeout_seconds = 2;
  return given;
}

std::unique_ptr<MemoryTraffic> beside(const Options& options) {
  return options.traffic ? std::make_unique<MemoryTraffic>(options.devices) : nullptr;
}

// Calls in a row.
std::string run_queued(const MutantLayer& layer, const Options& options, int& calls) {
  Group group(group_options(layer, options));
  uniep::test::disturb(group, {.shuffle_seed = 1});
  QueuedCalls queued(group, layer, options.seed);
  disturb_calls(group, options.seed);
  const std::unique_ptr<MemoryTraffic> traffic = beside(options);
  std::string text;
  for (const double end = seconds_now() + options.seconds; text.empty() && seconds_now() < end; ++calls) {
    if (traffic) traffic->go_on();
    text = queued.run();
  }
  return text;
}

// Batches in turn, each of which is waited for.
std::string run_in_turn(const MutantLayer& layer, const Options& options, int& calls) {
  const bool backward = layer.how.backward.has_value();
  Kernels kernels(0, kernel_folder());
  Batch batches[2];
  for (Batch& batch : batches) {
    const ScopedDevice scope(0);
    batch.data = mutant_batch(layer, options.seed * 2 + static_cast<uint64_t>(&batch - batches));
    batch.expected = naive_layer(kernels, layer.config, batch.data, backward ? main_grad : nullptr);
  }
  Group group(group_options(layer, options));
  uniep::test::disturb(group, {.shuffle_seed = 1});  // poisons memory
  std::optional<cli::LayerRunner> runners[2];        // they go before the group
  for (int i = 0; i < 2; ++i) {
    runners[i].emplace(group, layer.config, batches[i].data, cli::RunnerOptions{.main_grad = main_grad});
  }
  const std::unique_ptr<MemoryTraffic> traffic = beside(options);
  std::string text;
  for (const double end = seconds_now() + options.seconds; text.empty() && seconds_now() < end; ++calls) {
    if (traffic) traffic->go_on();
    cli::LayerRunner& runner = *runners[calls % 2];
    runner.forward(layer.how.schedule);
    if (calls == 0) disturb_calls(group, options.seed);
    if (backward) runner.backward(*layer.how.backward);
    text = uniep::test::difference(runner.result(), batches[calls % 2].expected);
  }
  return text;
}

// Runs the layer until the time is over or something is wrong.
Fate run_layer(const Subject& subject, const Options& options) {
  const MutantLayer layer = mutant_layer(subject.layer);
  int calls = 0;
  try {
    const std::string text =
        subject.layer.starts_with("queued") ? run_queued(layer, options, calls) : run_in_turn(layer, options, calls);
    if (!text.empty()) {
      std::printf("call %d: %s\n", calls, text.c_str());
      return Fate::kBytes;
    }
  } catch (const Error& error) {
    std::printf("call %d: %s\n", calls, error.what());
    return error.status() == Status::kTimeout ? Fate::kTimeout : Fate::kError;
  }
  std::printf("%d calls\n", calls);
  return Fate::kSurvived;
}

// A process of this program for one name.
ChildProcess start(const std::string& what, const Subject& subject, const Options& options) {
  std::vector<std::string> words = {what,        subject.name,
                                    "--devices", std::to_string(options.devices),
                                    "--seconds", std::to_string(options.seconds),
                                    "--seed",    std::to_string(options.seed)};
  if (!options.traffic) words.emplace_back("--no-traffic");
  return ChildProcess(words);
}

// The layer's, and what a fault may be in beside them.
std::vector<KernelRequest> kernels_of(const Subject& subject) {
  const MutantLayer layer = mutant_layer(subject.layer);
  std::vector<KernelRequest> requests = kernels_of(layer);
  requests.push_back(begin_call_request());
  return requests;
}

// What all of them have.
std::vector<KernelRequest> common_kernels() {
  std::vector<KernelRequest> requests = oracle_kernels(kernel_folder());
  requests.push_back(Kernels::request(kernel_folder(), "delay_kernels.cu", "test_delay"));
  requests.push_back(MemoryTraffic::request());
  for (const KernelRequest& request :
       {begin_call_request(), place_request(), row_of_source_request(), program_tables_request(), prob_sum_request()}) {
    requests.push_back(request);
  }
  return requests;
}

// Each in a process of its own, since a process has one variant. Returns the names of those that do not compile.
std::set<std::string> compile_all(const std::vector<Subject>& subjects, const Options& options, int threads) {
  compile_kernels(common_kernels(), threads);
  const double begin = seconds_now();
  std::vector<std::pair<std::string, ChildProcess>> running;
  std::set<std::string> failed;
  std::size_t next = 0;
  while (next < subjects.size() || !running.empty()) {
    if (next < subjects.size() && running.size() < static_cast<std::size_t>(threads)) {
      running.emplace_back(subjects[next].name, start("--compile-one", subjects[next], options));
      ++next;
      continue;
    }
    for (auto child = running.begin(); child != running.end();) {
      const bool ended = child->second.has_ended();
      if (ended && child->second.exit_status() != 0) failed.insert(child->first);
      child = ended ? running.erase(child) : std::next(child);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::printf("kernels of %zu runs in the cache, %.0f s\n", subjects.size(), seconds_now() - begin);
  std::fflush(stdout);
  return failed;
}

Fate run_in_process(const Subject& subject, const Options& options) {
  ChildProcess child = start("--run", subject, options);
  if (!await(options.limit, [&] { return child.has_ended(); })) return Fate::kTimeout;
  const int status = child.exit_status();
  // A signal: CUDA's or the library's.
  return status < 0 ? Fate::kError : static_cast<Fate>(status);
}

// Names that have a line, and what it says.
std::map<std::string, std::string> lines_of(const std::string& file) {
  std::map<std::string, std::string> lines;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) lines[line.substr(0, line.find(' '))] = line;
  return lines;
}

struct Totals {
  int killed = 0, survived = 0, expected_to_survive = 0, wrong = 0;
};

void count(Totals& totals, const Subject& subject, Fate fate) {
  if (subject.mutant == nullptr || (fate != Fate::kSurvived && !is_killed(fate))) {
    totals.wrong += fate == Fate::kSurvived ? 0 : 1;
  } else if (is_killed(fate)) {
    ++totals.killed;
  } else {
    ++(subject.mutant->survives.empty() ? totals.survived : totals.expected_to_survive);
  }
}

std::string line_of(const Subject& subject, Fate fate, double seconds) {
  std::string words = to_text(fate);
  if (subject.mutant == nullptr) {
    words = fate == Fate::kSurvived ? "right bytes" : "FAIL: " + words;
  } else if (fate == Fate::kSurvived) {
    words += subject.mutant->survives.empty() ? " | FAIL: " + subject.mutant->breaks
                                              : " as said | " + subject.mutant->survives;
  } else if (!subject.mutant->survives.empty()) {
    words += " | though said to survive: " + subject.mutant->survives;
  }
  return fmt::format("{:<30} {:<10} {:5.1f} s  {}", subject.name, subject.layer, seconds, words);
}

Fate fate_in(const std::string& line) {
  for (const Fate fate : {Fate::kBytes, Fate::kTimeout, Fate::kError, Fate::kSurvived}) {
    if (line.find(to_text(fate)) != std::string::npos) return fate;
  }
  return line.find("right bytes") != std::string::npos ? Fate::kSurvived : Fate::kBroken;
}

int run_all(const Options& options) {
  const std::vector<Subject> subjects = chosen(options);
  const std::map<std::string, std::string> before =
      options.results.empty() ? std::map<std::string, std::string>() : lines_of(options.results);
  std::vector<Subject> left;
  Totals totals;
  for (const Subject& subject : subjects) {
    const auto found = before.find(subject.name);
    if (found == before.end()) {
      left.push_back(subject);
    } else {
      count(totals, subject, fate_in(found->second));
    }
  }
  const std::set<std::string> not_compiled =
      compile_all(left, options, static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  for (const Subject& subject : left) {
    if (not_compiled.contains(subject.name)) {
      std::printf("%-30s FAIL: its kernels do not compile\n", subject.name.c_str());
      ++totals.wrong;
      continue;
    }
    const double begin = seconds_now();
    const Fate fate = run_in_process(subject, options);
    count(totals, subject, fate);
    const std::string line = line_of(subject, fate, seconds_now() - begin);
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
    if (!options.results.empty()) std::ofstream(options.results, std::ios::app) << line << "\n";
  }
  std::printf("mutants: %d killed, %d survived, %d survived as said; %d wrong without a fault, or not compiled\n",
              totals.killed, totals.survived, totals.expected_to_survive, totals.wrong);
  return totals.survived == 0 && totals.wrong == 0 ? 0 : 1;
}

void print_list(const Options& options) {
  int index = 0;
  for (const Subject& subject : chosen(options)) {
    if (subject.mutant == nullptr) continue;
    const KernelMutant& m = *subject.mutant;
    std::printf("%3d %-30s %-10s %d  %s%s%s\n", index++, m.name.c_str(), m.layer.c_str(), m.gpus, m.breaks.c_str(),
                m.survives.empty() ? "" : " | survives: ", m.survives.c_str());
  }
}

int run(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  if (options.run.empty()) return run_all(options);
  const Subject subject = find_subject(options.run);
  set_kernel_variant(variant_of(subject));
  return static_cast<int>(run_layer(subject, options));
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  using namespace uniep::cuda;
  using namespace uniep::cuda::test;
  const Options options = read_options(argc, argv);
  try {
    if (options.list) {
      print_list(options);
      return 0;
    }
    if (!options.compile.empty()) {
      const Subject subject = find_subject(options.compile);
      set_kernel_variant(variant_of(subject));
      compile_kernels(kernels_of(subject), 1);
      return 0;
    }
    if (options.compile_threads > 0) {
      const std::set<std::string> failed = compile_all(chosen(options), options, options.compile_threads);
      for (const std::string& name : failed) std::printf("FAIL: %s: its kernels do not compile\n", name.c_str());
      return failed.empty() ? 0 : 1;
    }
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  return run_on_hopper(run, argc, argv);
}
