#include "cli/calibration_model.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/layer_options.h"
#include "program/buildable.h"
#include "tune/median.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

constexpr std::size_t kLongestFrom = 380;  // bytes of a number's origin

LayerOptions options_of(const tune::CalibrationLayer& layer) {
  LayerOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = layer.ranks;
  options.shape = layer.shape;
  options.tokens_given = {layer.tokens};
  return options;
}

bool is_tile_of(const sim::MachineDescription& machine, std::string_view key, Direction direction) {
  const std::size_t tile = std::stoul(std::string(key.substr(key.find('[') + 1)));
  const bool backward = direction == Direction::kBackward;
  for (const sim::Work work : {sim::Work::kFc1, sim::Work::kFc2, sim::Work::kDgradFc2, sim::Work::kDgradFc1,
                               sim::Work::kWgradFc2, sim::Work::kWgradFc1}) {
    if ((work >= sim::Work::kDgradFc2) == backward && machine.tiles.at(tile).work.has(work)) return true;
  }
  return false;
}

// "57 layers and 2 timelines"
std::string fitted_to(const CalibrationModel& model, const TimelineModel* timelines) {
  std::size_t layers = 0, calls = 0;
  for (const tune::CalibrationLayer& layer : model.layers()) layers += !layer.held_out;
  for (std::size_t i = 0; timelines != nullptr && i < timelines->calls().size(); ++i) {
    calls += !timelines->calls()[i].held_out;
  }
  const std::string of_calls = fmt::format("{} timeline{}", calls, calls == 1 ? "" : "s");
  if (calls == 0) return fmt::format("{} layers", layers);
  return layers == 0 ? of_calls : fmt::format("{} layers and {}", layers, of_calls);
}

}  // namespace

Schedule calibration_schedule(const tune::CalibrationLayer& layer, const Machine& machine) {
  LayerOptions options = options_of(layer);
  options.schedule = PartialSchedule::parse(layer.schedule);
  return options.resolved(layer.direction, machine);
}

CalibrationModel::CalibrationModel(const std::vector<tune::CalibrationLayer>& layers,
                                   const sim::MachineDescription& machine)
    : machine_(machine) {
  for (const tune::CalibrationLayer& layer : layers) {
    try {
      add(layer);
    } catch (const Error& error) {
      dropped_.push_back(fmt::format("{}: {}", tune::layer_name(layer), error.what()));
    }
  }
  find_turns();
}

void CalibrationModel::add(const tune::CalibrationLayer& layer) {
  const LayerOptions options = options_of(layer);
  const LayerShape& shape = layer.shape;
  if (layer.ranks > std::min(machine_.most_ranks(), kMaxBuiltRanks)) {
    throw Error(Status::kInvalidArgument, fmt::format("ranks: {}; machine {} links at most {}", layer.ranks,
                                                      machine_.name, machine_.most_ranks()));
  }
  const Machine machine = sim::schedule_machine(machine_, layer.ranks);
  const Schedule schedule = calibration_schedule(layer, machine);
  std::shared_ptr<const internal::PlacementState>& placement =
      placements_[{shape.hidden, shape.intermediate, layer.ranks, layer.tokens, shape.experts, shape.topk}];
  if (!placement) placement = place_ids(options, make_ids(options)).state();
  programs_.push_back(std::make_unique<Program>(
      sim::simulated_request(shape, options.numerics, schedule, layer.direction, machine_), placement));
  costs_.emplace_back(*programs_.back(), true);
  layers_.push_back(layer);
}

void CalibrationModel::find_turns() {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (i == 0 || !tune::take_turns(layers_[i - 1], layers_[i])) turns_.push_back({.begin = i, .end = i, .calls = {}});
    turns_.back().end = i + 1;
    turn_of_.push_back(turns_.size() - 1);
  }
  for (Turn& turn : turns_) {
    for (std::size_t i = turn.begin; i < turn.end; ++i) {
      const bool measured = !layers_[i].milliseconds.empty();
      if (!measured || layers_[i].state == sim::State::kPaused) {
        turn.calls = {};
        break;
      }
      const std::vector<double>& calls = layers_[i].milliseconds;
      turn.calls.add(1e3 * tune::median(calls), simulated(i, machine_, 0).load, static_cast<int>(calls.size()));
    }
  }
}

sim::Simulated CalibrationModel::simulated(std::size_t layer, const sim::MachineDescription& machine, double limit_ghz,
                                           double near_ghz) const {
  return sim::simulate(costs_[layer], machine,
                       {.state = layers_[layer].state, .limit_ghz = limit_ghz, .near_ghz = near_ghz, .one_rank = true});
}

sim::Simulated CalibrationModel::in_turn(std::size_t layer, const sim::MachineDescription& machine,
                                         double near_ghz) const {
  const sim::Turns& calls = turns_[turn_of_[layer]].calls;
  return simulated(layer, machine, calls.calls > 0 ? calls.limit_ghz(machine.clock) : 0, near_ghz);
}

double CalibrationModel::milliseconds(std::size_t layer, const sim::MachineDescription& machine,
                                      double near_ghz) const {
  return in_turn(layer, machine, near_ghz).ms;
}

std::vector<double> CalibrationModel::clocks(const sim::MachineDescription& machine) const {
  std::vector<double> ghz;
  for (std::size_t i = 0; i < layers_.size(); ++i) ghz.push_back(in_turn(i, machine, 0).clock_ghz);
  return ghz;
}

std::vector<double> CalibrationModel::milliseconds_in_turn(const sim::MachineDescription& machine) const {
  constexpr int kRounds = 3;  // until times and clocks agree
  std::vector<double> all;
  for (const Turn& turn : turns_) {
    double limit = 0;
    for (int round = 0; round < kRounds; ++round) {
      sim::Turns calls;
      all.resize(turn.begin);
      for (std::size_t i = turn.begin; i < turn.end; ++i) {
        const sim::Simulated layer = simulated(i, machine, limit);
        all.push_back(layer.ms);
        calls.add(1e3 * layer.ms, layer.load);
      }
      if (layers_[turn.begin].state == sim::State::kPaused) break;
      limit = calls.limit_ghz(machine.clock);
    }
  }
  return all;
}

bool follows_constant(const Program& program, sim::State state, const sim::MachineDescription& machine,
                      std::string_view key) {
  const Schedule& schedule = program.request().schedule;
  const bool paused = state == sim::State::kPaused, on_sms = schedule.comm.where == CommWhere::kSms;
  const bool mixed = schedule.order.interleave == Interleave::kMixed;
  const bool dynamic = schedule.queue == QueueKind::kDynamic;
  const int raster = schedule.order.raster;
  if (key.starts_with("links") || key == "time.peers") return program.ranks() > 1;
  if (key == "copy.chunk_remote") return program.ranks() > 1 && !on_sms;
  if (key == "clock.linked") return program.ranks() > 1 && !paused;
  if (key.starts_with("tiles")) return is_tile_of(machine, key, program.request().direction);
  if (key == "clock.limit" || key == "clock.rest") return !paused;
  if (key.starts_with("clock.pause")) return paused;
  if (key == "copy.push") return schedule.dispatch.transport == DispatchTransport::kPush;
  if (key == "copy.send") return schedule.combine.transport == CombineTransport::kStaged && !on_sms;
  if (key.starts_with("port")) return on_sms;
  if (key.starts_with("copy") && key != "copy.task") return !on_sms;
  if (key == "slowdown.mixed_list") return mixed && !dynamic && !paused;
  if (key == "slowdown.mixed_list_pause") return mixed && !dynamic && paused;
  if (key == "slowdown.mixed_queues") return mixed && dynamic;
  if (key == "slowdown.raster_4") return raster <= 4;
  if (key == "slowdown.raster_8") return raster > 4 && raster <= 8;
  if (key == "slowdown.static_queue") return !dynamic;
  if (key == "time.launch") return schedule.fusion != Fusion::kLayer;
  return true;
}

bool CalibrationModel::follows(std::size_t layer, std::string_view key) const {
  return follows_constant(*programs_[layer], layers_[layer].state, machine_, key);
}

tune::MachineFit CalibrationModel::fit(const sim::MachineDescription& base, bool same_kind, int threads,
                                       const TimelineModel* timelines) const {
  tune::FitRequest request;
  request.base = &base;
  request.same_kind = same_kind;
  request.threads = threads;
  for (const tune::CalibrationLayer& layer : layers_) {
    request.ranks = std::max(request.ranks, layer.ranks);
    request.milliseconds.push_back(layer.milliseconds);
    request.held_out.push_back(layer.held_out);
  }
  request.turns = turns();
  request.predict = [&, ghz = clocks(base)](std::size_t layer, const sim::MachineDescription& machine) {
    return milliseconds(layer, machine, ghz[layer] * sim::clock_scale(machine, base, layers_[layer].state));
  };
  request.follows = [&](std::size_t layer, std::string_view key) {
    return layer < layers_.size() ? follows(layer, key) : timelines->follows(layer - layers_.size(), key);
  };
  if (timelines != nullptr) timelines->add_to(request);
  return tune::fit_machine(request);
}

sim::MachineDescription base_for(const sim::MachineDescription& base, const tune::Calibration& calibration) {
  sim::MachineDescription machine = base;
  for (std::size_t i = 0; i < machine.workers.size(); ++i) {
    if (!machine.workers[i].work.has(sim::Work::kFc1)) continue;
    machine.workers[i].count = calibration.compute_units;
    machine.origin[fmt::format("workers[{}].count", i)] = {sim::Source::kMeasured, "the driver"};
  }
  return machine;
}

Calibrated calibrated_machine(const tune::Calibration& calibration, const CalibrationModel& model,
                              const sim::MachineDescription& base, int threads, const TimelineModel* timelines) {
  Calibrated made;
  const bool same_kind = sim::describes_kind(base, calibration.device, calibration.compute_units);
  made.fit = model.fit(base, same_kind, threads, timelines);
  made.machine = made.fit.machine;
  made.machine.name = "calibrated";
  made.machine.title =
      fmt::format("{}, {} compute units, as uniep calibrate found it", calibration.device, calibration.compute_units)
          .substr(0, kLongestFrom);
  for (auto& [key, origin] : made.machine.origin) {
    if (origin.from == "the driver") continue;
    origin.from = fmt::format("taken over from {}: {}", base.name, origin.from).substr(0, kLongestFrom);
  }
  const std::string fitted = fitted_to(model, timelines);
  for (const tune::FittedConstant& constant : made.fit.constants) {
    if (!constant.told) continue;
    const std::string& key = constant.constant.key;
    std::string from = fmt::format("uniep calibrate on {}: fitted to {}", calibration.device, fitted);
    if (made.fit.has_thirds) from += fmt::format(", spread {:.1f} %", 100 * constant.spread);
    made.machine.origin[key] = {sim::Source::kMeasured, from.substr(0, kLongestFrom)};
    if (made.fit.disagreement > kMostSpread && constant.spread > kMostSpread) made.doubtful.push_back(key);
  }
  // Clocks that differ by turn move no constant far.
  if (made.fit.disagreement > kMostSpread && made.doubtful.empty()) made.doubtful.emplace_back(kClocksOfTurns);
  made.machine.calibrated = sim::CalibratedGpu{calibration.device, made.doubtful};
  return made;
}

}  // namespace uniep::cli
