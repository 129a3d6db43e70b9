#include "cli/timeline_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/calibration_model.h"
#include "io/file.h"
#include "io/quote.h"
#include "model/refuse.h"
#include "program/buildable.h"
#include "program/order.h"

namespace uniep::cli {
namespace {

constexpr std::size_t kMostTimelineCalls = 1000;
constexpr int kFewRanks = 2;  // that are all simulated; of more one stands for all where they are alike

// What `work` throws, with the file's name in front.
template <typename Work>
auto naming_file(const std::string& file, Work&& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw Error(error.status(), fmt::format("{}: {}", io::quote_path(file), error.what()));
  }
}

// Trace files name themselves in messages.
Trace read_trace(const std::string& file) {
  return parse_trace(io::read_text_file(file), file);
}

void require_same_gpu(const TimelineCall& call, const TimelineCall& first) {
  const TracedMachine &own = call.run.machine, &other = first.run.machine;
  if (own.device == other.device && own.compute_units == other.compute_units) return;
  refuse(fmt::format("is of {} with {} compute units, and {} of {} with {}; must be of one kind of GPU",
                     io::quote_text(own.device), own.compute_units, io::quote_path(first.file),
                     io::quote_text(other.device), other.compute_units));
}

TimelineStyle style_of(const Program& program) {
  return {.copies_on_sms = program.request().schedule.comm.where == CommWhere::kSms,
          .launches = program.rank(0).launches};
}

int64_t gemm_tiles(const Timeline& timeline) {
  return std::count_if(timeline.tasks.begin(), timeline.tasks.end(),
                       [&](const TimelineTask& task) { return !is_copy_stage(timeline.stages[task.stage]); });
}

// Before anything is simulated: a small file could ask for days of it. Lists have places for the halves of pairs that
// have no tile.
void require_tiles_of(const Program& program, const Timeline& timeline) {
  if (timeline.ranks != program.ranks())
    refuse(fmt::format("it has {} ranks, not {}", timeline.ranks, program.ranks()));
  int64_t most = 0;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const RankProgram& p = program.rank(rank);
    for (int launch = 0; launch < p.launches; ++launch) most += list_length(p, launch, ListKind::kCompute);
  }
  const int64_t tiles = gemm_tiles(timeline);
  if (tiles > most || most > 2 * tiles) {
    refuse(fmt::format("it has {} tiles of GEMMs, and the layer that it names up to {}", tiles, most));
  }
}

// Sums are cut as engines like, and copies on SMs are recorded by one warp of each.
void require_same_tiles(const TimelineNumbers& measured, const TimelineNumbers& simulated, const TimelineStyle& style,
                        int64_t ranks) {
  for (const auto& [name, tiles] : measured.tiles) {
    const auto other = simulated.tiles.find(name);
    if (other == simulated.tiles.end()) {
      refuse(fmt::format("its stage {} is not in its schedule", io::quote_text(name)));
    }
    const bool counts = name != "reduce" && !(style.copies_on_sms && is_copy_stage(name)) && simulated.ranks == ranks;
    if (counts && other->second != tiles) {
      refuse(fmt::format("it has {} tiles of {}, and the layer that it names {}", tiles, name, other->second));
    }
  }
  for (const auto& [name, tiles] : simulated.tiles) {
    if (measured.tiles.count(name) == 0) refuse(fmt::format("it has no tile of {}", name));
  }
}

std::unique_ptr<Program> program_of(const TracedRun& run, const sim::MachineDescription& machine) {
  const LayerOptions& layer = run.layer;
  const int most = std::min(machine.most_ranks(), kMaxBuiltRanks);
  if (layer.ranks > most)
    refuse(fmt::format("ranks: {}; machine {} links at most {}", layer.ranks, machine.name, most));
  Machine target = sim::schedule_machine(machine, layer.ranks);
  target.workers = layer.workers;
  const Schedule schedule = layer.resolved(run.direction, target);
  const Placement placement = place_ids(layer, make_ids(layer));
  ProgramRequest request = sim::simulated_request(layer.shape, layer.numerics, schedule, run.direction, machine);
  request.workers = layer.workers;
  return std::make_unique<Program>(request, placement.state());
}

bool ranks_are_alike(const LayerOptions& layer) {
  const std::vector<int64_t> tokens = layer.tokens();
  return layer.routing == "uniform" && std::count(tokens.begin(), tokens.end(), tokens.front()) == std::ssize(tokens);
}

}  // namespace

std::string name_of(const TimelineCall& call) {
  const LayerOptions& layer = call.run.layer;
  return fmt::format("{} of {}: {},{},{},{} x {}", call.run.direction == Direction::kForward ? "forward" : "backward",
                     call.file, layer.shape.hidden, layer.shape.intermediate, layer.shape.experts, layer.shape.topk,
                     layer.ranks);
}

std::vector<TimelineCall> read_timelines(const std::vector<std::string>& files) {
  std::vector<TimelineCall> calls;
  for (const std::string& file : files) {
    const Trace trace = read_trace(file);
    naming_file(file, [&] {
      if (trace.marks.empty())
        refuse("has no mark that says what ran; must be a timeline of `uniep run` or `uniep bench`");
      for (std::size_t mark = 0; mark < trace.marks.size(); ++mark) {
        if (calls.size() == kMostTimelineCalls)
          refuse(fmt::format("comes after {} calls; must be at most so many", kMostTimelineCalls));
        TimelineCall call{file, traced_run(trace.marks[mark]), timeline_of(trace, mark)};
        call.held_out = files.size() > 2 && &file == &files.back();
        if (!calls.empty()) require_same_gpu(call, calls.front());
        calls.push_back(std::move(call));
      }
      return 0;
    });
  }
  return calls;
}

TimelineModel::TimelineModel(std::vector<TimelineCall> calls, const sim::MachineDescription& machine)
    : machine_(machine), calls_(std::move(calls)) {
  for (TimelineCall& call : calls_) {
    naming_file(call.file, [&] { add(call); });
  }
  find_states();
}

void TimelineModel::add(TimelineCall& call) {
  const std::size_t at = programs_.size();
  programs_.push_back(program_of(call.run, machine_));
  require_tiles_of(*programs_.back(), call.timeline);
  const TimelineStyle style = style_of(*programs_.back());
  measured_.push_back(timeline_numbers(std::exchange(call.timeline, {}), style));
  const TimelineNumbers there = simulated(at, call.run.state.value_or(sim::State::kSustained), machine_);
  require_same_tiles(measured_.back(), there, style, programs_.back()->ranks());
}

TimelineNumbers TimelineModel::simulated(std::size_t call, sim::State state,
                                         const sim::MachineDescription& machine) const {
  const Program& program = *programs_[call];
  const bool one_rank = program.ranks() > kFewRanks && ranks_are_alike(calls_[call].run.layer);
  const sim::Simulated made = sim::simulate(program, machine, {.state = state, .record = true, .one_rank = one_rank});
  return timeline_numbers(timeline_of(program, made.timeline), style_of(program));
}

// How much longer a call's tiles take than simulated ones, as a logarithm.
double TimelineModel::tiles_off(std::size_t call, sim::State state) const {
  const TimelineNumbers there = simulated(call, state, machine_);
  double sum = 0;
  int count = 0;
  for (const TimelineNumber& number : measured_[call].numbers) {
    const double us = there.of(number.name);
    if (!number.name.ends_with(": a tile") || us <= 0) continue;
    sum += std::log(number.us / us);
    ++count;
  }
  return count > 0 ? sum / count : 0;
}

// A machine whose tiles are all slower than described says that by all of its calls, and a state by some.
void TimelineModel::find_states() {
  constexpr double kApart = 0.02;    // calls of one machine
  constexpr double kMachine = 0.12;  // a machine and its description
  constexpr double kTold = 0.01;     // states that can be told apart
  constexpr sim::State kStates[] = {sim::State::kSustained, sim::State::kPaused};
  std::vector<std::vector<double>> off(calls_.size());  // in the states that it may have
  std::vector<double> machines = {0};
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    for (const sim::State state : kStates) {
      if (calls_[i].run.state.value_or(state) == state) off[i].push_back(tiles_off(i, state));
    }
    machines.insert(machines.end(), off[i].begin(), off[i].end());
  }
  // Where both are as near, as in calls at the highest clock, it is the usual one.
  const auto nearest = [&](std::size_t call, double machine) {
    const double first = std::abs(off[call].front() - machine), last = std::abs(off[call].back() - machine);
    return last < first - kTold ? std::prev(off[call].end()) : off[call].begin();
  };
  const auto unlikely = [&](double machine) {
    double sum = std::pow(machine / kMachine, 2);
    for (std::size_t i = 0; i < calls_.size(); ++i) sum += std::pow((*nearest(i, machine) - machine) / kApart, 2);
    return sum;
  };
  const double machine = *std::min_element(machines.begin(), machines.end(),
                                           [&](double a, double b) { return unlikely(a) < unlikely(b); });
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!calls_[i].run.state) calls_[i].run.state = kStates[nearest(i, machine) - off[i].begin()];
  }
}

std::vector<double> TimelineModel::predicted(std::size_t call, const sim::MachineDescription& machine) const {
  constexpr double kLeastUs = 1;
  const TimelineNumbers there = simulated(call, state(call), machine);
  std::vector<double> numbers;
  for (const TimelineNumber& number : measured_[call].numbers) {
    numbers.push_back(std::max(kLeastUs, there.of(number.name)));
  }
  return numbers;
}

bool TimelineModel::follows(std::size_t call, std::string_view key) const {
  return follows_constant(*programs_[call], state(call), machine_, key);
}

void TimelineModel::add_to(tune::FitRequest& request) const {
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    std::vector<tune::FitNumber>& numbers = request.timelines.emplace_back();
    for (const TimelineNumber& number : measured_[i].numbers) numbers.push_back({number.us, number.error});
    request.timeline_ranks.push_back(programs_[i]->ranks());
    request.held_out.push_back(calls_[i].held_out);
  }
  request.predict_timeline = [this](std::size_t call, const sim::MachineDescription& machine) {
    return predicted(call, machine);
  };
}

}  // namespace uniep::cli
