#include "cli/calibrate_measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "cli/bench_ranks.h"
#include "cli/bench_tensors.h"
#include "cli/calibration_model.h"
#include "engine/cuda/calls/engine.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

using Clock = std::chrono::steady_clock;
using tune::CalibrationLayer;

constexpr double kPauseSeconds = 1.0;
constexpr double kWarmUpShare = 2.0 / 3;  // of a session: clocks swing after the pause in which tensors are made
constexpr int kPausedCalls = 4;           // of each layer, while a GPU still has the clocks of after a pause
constexpr int kFewestCalls = 6, kMostCalls = 60;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

BenchRequest bench_request(const CalibrationLayer& layer, const std::vector<int>& devices) {
  BenchRequest request;
  request.layer.engine = EngineKind::kCuda;
  request.layer.shape = layer.shape;
  request.layer.ranks = layer.ranks;
  request.layer.tokens_given = {layer.tokens};
  request.devices.assign(devices.begin(), devices.begin() + layer.ranks);
  return request;
}

// Layers that share tensors, on their GPUs.
class LayerGroup {
 public:
  LayerGroup(const CalibrationLayer& like, const std::vector<int>& devices)
      : backward_(like.direction == Direction::kBackward),
        request_(bench_request(like, devices)),
        ranks_(request_),
        tensors_(ranks_, request_.layer.config(), {.backward = backward_, .gemms = false}),
        placement_(place(ranks_.group(), request_.layer.shape, ranks_.routings())) {
    if (backward_) forward(request_.layer.resolved(Direction::kForward, ranks_.group().machine()));
  }

  Group& group() { return ranks_.group(); }
  BenchGpus& gpus() { return ranks_.gpus(); }

  Schedule schedule(const CalibrationLayer& layer) { return calibration_schedule(layer, group().machine()); }
  void call(const Schedule& schedule) {
    if (!backward_) return forward(schedule);
    backward(group(), request_.layer.config(), schedule, saved_, tensors_.backward());
  }
  // Milliseconds of a call that has run before; throws what it fails with.
  double once(const Schedule& schedule) {
    call(schedule);
    group().synchronize();
    const double ms = gpus().time([&] { call(schedule); });
    group().synchronize();
    return ms;
  }
  void recover() {
    group().recover();
    if (backward_) forward(request_.layer.resolved(Direction::kForward, group().machine()));
  }

 private:
  void forward(const Schedule& schedule) {
    saved_ = Saved();
    saved_ = uniep::forward(group(), request_.layer.config(), schedule, placement_, tensors_.forward());
  }

  const bool backward_;
  BenchRequest request_;
  BenchRanks ranks_;
  LayerTensors tensors_;
  Placement placement_;
  Saved saved_;
};

class Measurement {
 public:
  Measurement(const std::vector<CalibrationLayer>& layers, const MeasureRequest& request)
      : layers_(layers), request_(request), begin_(Clock::now()) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const bool same = i > 0 && tune::take_turns(layers[i], layers[i - 1]);
      sustained_sessions_ += !same && layers[i].state == sim::State::kSustained;
    }
  }

  tune::Calibration run() {
    for (std::size_t begin = 0; begin < layers_.size();) {
      std::size_t end = begin;
      while (end < layers_.size() && tune::share_tensors(layers_[begin], layers_[end])) ++end;
      measure_group({layers_.begin() + begin, layers_.begin() + end});
      begin = end;
      if (request_.keep && !calibration_.layers.empty()) request_.keep(calibration_);
    }
    if (calibration_.layers.empty()) {
      throw Error(Status::kDevice, "no layer could be measured; the first one's reason: " +
                                       (calibration_.dropped.empty() ? "none" : calibration_.dropped.front()));
    }
    return std::move(calibration_);
  }

 private:
  struct Ready {
    CalibrationLayer layer;
    Schedule schedule;
    double ms = 0;
  };

  void drop(const CalibrationLayer& layer, const std::string& why) {
    calibration_.dropped.push_back(fmt::format("{}: {}", tune::layer_name(layer), why));
    request_.progress("dropped " + calibration_.dropped.back());
  }

  void measure_group(const std::vector<CalibrationLayer>& layers) {
    if (seconds_since(begin_) > request_.longest) {
      for (const CalibrationLayer& layer : layers) drop(layer, fmt::format("{} s are over", request_.longest));
      return;
    }
    try {
      LayerGroup group(layers.front(), request_.devices);
      calibration_.device = group.gpus().name();
      calibration_.compute_units = group.group().workers();
      for (const sim::State state : {sim::State::kSustained, sim::State::kPaused}) {
        std::vector<Ready> session;
        for (const CalibrationLayer& layer : layers) {
          if (layer.state == state) make_ready(group, layer, session);
        }
        if (!session.empty()) time_session(group, state, session);
      }
    } catch (const std::exception& error) {
      for (const CalibrationLayer& layer : layers) {
        const auto has = [&](const CalibrationLayer& one) {
          return tune::take_turns(one, layer) && one.schedule == layer.schedule;
        };
        const auto names = [&](const std::string& line) { return line.starts_with(tune::layer_name(layer) + ": "); };
        const bool known = std::any_of(calibration_.layers.begin(), calibration_.layers.end(), has) ||
                           std::any_of(calibration_.dropped.begin(), calibration_.dropped.end(), names);
        if (!known) drop(layer, error.what());
      }
    }
  }

  // Runs it by itself, so that what fails is known before layers take turns.
  void make_ready(LayerGroup& group, const CalibrationLayer& layer, std::vector<Ready>& session) {
    try {
      Ready ready{layer, group.schedule(layer)};
      ready.ms = group.once(ready.schedule);
      session.push_back(std::move(ready));
    } catch (const Error& error) {
      drop(layer, error.what());
      if (error.status() != Status::kInvalidArgument && error.status() != Status::kUnsupported) group.recover();
    }
  }

  void time_session(LayerGroup& group, sim::State state, std::vector<Ready>& session) {
    const bool sustained = state == sim::State::kSustained;
    const double share = request_.seconds / std::max(1, sustained_sessions_);
    double turn = 0;
    std::vector<BenchGpus::Work> works;
    for (const Ready& ready : session) {
      turn += ready.ms * 1e-3;
      works.push_back({[&group, &ready] { group.call(ready.schedule); },
                       sustained ? BenchGpus::Start::kBackToBack : BenchGpus::Start::kTogether});
    }
    int calls = kPausedCalls;
    if (sustained) {
      calls = std::clamp(static_cast<int>(share * (1 - kWarmUpShare) / std::max(turn, 1e-6)), kFewestCalls, kMostCalls);
    } else {
      std::this_thread::sleep_for(std::chrono::duration<double>(kPauseSeconds));
    }
    group.gpus().warm_up_for(sustained ? share * kWarmUpShare : 0);
    const std::vector<std::vector<double>> times =
        sustained ? group.gpus().time_in_turn(works, calls) : group.gpus().time_cold_in_turn(works, calls);
    group.group().synchronize();
    for (std::size_t i = 0; i < session.size(); ++i) {
      CalibrationLayer layer = session[i].layer;
      layer.milliseconds = times[i];
      calibration_.layers.push_back(std::move(layer));
    }
    const CalibrationLayer& first = session.front().layer;
    request_.progress(fmt::format("{:4.1f} s: {} layers of {},{},{},{} on {} rank{}, {}, {} calls each",
                                  seconds_since(begin_), session.size(), first.shape.hidden, first.shape.intermediate,
                                  first.shape.experts, first.shape.topk, first.ranks, first.ranks > 1 ? "s" : "",
                                  sustained ? "sustained" : "paused", calls));
  }

  const std::vector<CalibrationLayer>& layers_;
  const MeasureRequest& request_;
  const Clock::time_point begin_;
  int sustained_sessions_ = 0;
  tune::Calibration calibration_;
};

}  // namespace

tune::Calibration measure_layers(const std::vector<CalibrationLayer>& layers, const MeasureRequest& request) {
  return Measurement(layers, request).run();
}

int compile_layers(const std::vector<CalibrationLayer>& layers, int workers) {
  std::vector<cuda::CompiledCall> calls;
  for (const CalibrationLayer& layer : layers) {
    Machine machine;
    machine.engine = EngineKind::kCuda;
    machine.ranks = layer.ranks;
    machine.workers = workers;
    calls.push_back({{layer.shape, {}}, layer.ranks, workers, calibration_schedule(layer, machine), layer.direction});
    if (layer.direction == Direction::kForward) continue;
    CalibrationLayer before = layer;
    before.direction = Direction::kForward;
    before.schedule = "auto";
    calls.push_back({{layer.shape, {}}, layer.ranks, workers, calibration_schedule(before, machine), before.direction});
  }
  return cuda::compile_calls(calls);
}

}  // namespace uniep::cli
