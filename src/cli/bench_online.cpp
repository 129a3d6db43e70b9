#include "cli/bench_online.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "api/machine_name.h"
#include "cli/chosen_schedule.h"
#include "cli/device_arrays.h"
#include "cli/layer_inputs.h"
#include "cli/layer_runner.h"
#include "cli/options.h"
#include "cli/sequential_run.h"
#include "io/hash64.h"
#include "train/candidate_check.h"
#include "train/rank_memory.h"
#include "tune/changed_fields.h"
#include "tune/median.h"
#include "uniep/tuner.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

GroupOptions online_options(const BenchRequest& request) {
  GroupOptions options;
  options.engine = request.layer.engine;
  options.ranks = request.layer.ranks;
  options.workers = request.layer.workers;
  options.devices = request.devices;
  return options;
}

class OnlineJob {
 public:
  OnlineJob(const BenchRequest& request, const OnlineBench& online)
      : layer_(request.layer),
        online_(online),
        group_(online_options(request)),
        data_(make_layer_data(layer_, {}, false, {0, layer_.ranks})),
        begin_(begin_schedule()),
        sequential_(sequential_schedules({begin_, {}}, layer_.config(), group_.machine()).forward),
        check_(group_, layer_.config(), most_tokens(), &device_arrays()) {
    fixed_.reserve(static_cast<std::size_t>(group_.ranks()));
    for (int rank = 0; rank < group_.ranks(); ++rank) add_rank(rank);
    tuner_ = std::make_unique<Tuner>(tuner_options());
  }

  OnlineReport run() {
    for (int64_t step = 0; step < online_.steps; ++step) {
      if (tuner_->wants_round()) tuner_->begin_round();
      std::vector<double> times;
      for (int call = 0; call < online_.calls; ++call) times.push_back(one_call(step * online_.calls + call));
      tuner_->step();
      step_ms_.push_back(tune::median(times));
      say_progress();
    }
    return {json().dump(2) + "\n", table(), differing_};
  }

 private:
  void say_progress() const {
    const auto done = std::ssize(step_ms_);
    if (done % std::max<int64_t>(1, online_.steps / 20) != 0) return;
    const TunerSpent spent = tuner_->spent();
    std::cerr << fmt::format(
        "uniep bench: step {} of {}: {:.3f} ms a call, {:.3f} of {:.1f} s lost to trying, {} differing\n", done,
        online_.steps, step_ms_.back(), spent.lost_milliseconds / 1e3, spent.layers_milliseconds / 1e3, differing_);
  }

  int64_t most_tokens() const { return *std::max_element(data_.tokens.begin(), data_.tokens.end()); }

  Schedule begin_schedule() const {
    PartialSchedule fields = layer_.given(Direction::kForward);
    for (const auto& [name, value] : online_.begin.values()) fields.set(name, value);
    return naming_option("--begin", [&] {
      return resolve(fields, {.direction = Direction::kForward,
                              .shape = layer_.shape,
                              .numerics = layer_.numerics,
                              .machine = group_.machine()});
    });
  }

  void add_rank(int rank) {
    const LayerShape& shape = layer_.shape;
    const int64_t experts = shape.experts / group_.ranks(), tokens = data_.tokens[static_cast<std::size_t>(rank)];
    const int64_t first = data_.first_token(rank);
    train::RankMemory& own = fixed_.emplace_back(group_.device(rank), &device_arrays());
    ForwardArguments arguments;
    arguments.x = own.input(data_.x_of(rank), tokens * shape.hidden);
    arguments.weights.w1 = own.input(data_.w1_of(rank), experts * data_.halves * shape.intermediate * shape.hidden);
    arguments.weights.w2 = own.input(data_.w2_of(rank), experts * shape.intermediate * shape.hidden);
    if (layer_.numerics.bias) {
      arguments.weights.b1 = own.input(data_.b1_of(rank), experts * data_.halves * shape.intermediate);
      arguments.weights.b2 = own.input(data_.b2_of(rank), experts * shape.hidden);
    }
    arguments.y = own.unread_result<BFloat16>(tokens * shape.hidden);
    arguments_.push_back(arguments);
    Routing routing;
    routing.tokens = tokens;
    routing.probs = own.input(data_.probs.data() + first * shape.topk, tokens * shape.topk);
    routings_.push_back(routing);
  }

  TunerOptions tuner_options() {
    TunerOptions options;
    options.machine = group_.machine();
    TunerLayer layer;
    layer.config = layer_.config();
    layer.tokens = most_tokens();
    layer.forward = begin_;
    layer.backward = layer_.resolved(Direction::kBackward, group_.machine());
    layer.fixed_forward = layer_.given(Direction::kForward);
    layer.fixed_backward = layer_.given(Direction::kBackward);
    options.layers = {layer};
    options.budget = online_.budget;
    options.folder = tuned_folder().path().string();
    options.machine_name = api::machine_name(group_);
    options.check = [this, backward = layer.backward](int, Direction direction, const Schedule& candidate,
                                                      const Schedule& incumbent) {
      return check_.check(direction, candidate, incumbent, backward);
    };
    options.prepare = [this](int, Direction direction, const Schedule& candidate) {
      return prepare(group_, layer_.config(), candidate, {.direction = direction});
    };
    options.log = [this](const std::string& line) {
      log_.push_back(line);
      std::cerr << line << '\n';
    };
    return options;
  }

  // Its time, in ms; of a call that a candidate fails the incumbent's.
  double one_call(int64_t number) {
    LayerOptions routed = layer_;
    routed.seed = io::avalanche64(layer_.seed + static_cast<uint64_t>(number + 1) * io::kGolden64);
    const std::vector<int32_t> ids = make_ids(routed);
    std::vector<train::RankMemory> memory;
    memory.reserve(routings_.size());
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      train::RankMemory& own = memory.emplace_back(group_.device(rank), &device_arrays());
      Routing& routing = routings_[static_cast<std::size_t>(rank)];
      routing.topk_ids =
          own.input(ids.data() + data_.first_token(rank) * layer_.shape.topk, routing.tokens * layer_.shape.topk);
    }
    const Placement placement = place(group_, layer_.shape, routings_);
    group_.synchronize();
    const TunerCall planned = tuner_->schedule(0, Direction::kForward);
    double milliseconds = 0;
    try {
      CallTime time{timed(planned.schedule, placement)};
      milliseconds = time.milliseconds;
      for (int rank = 0; rank < group_.ranks(); ++rank) {
        const double rows = static_cast<double>(placement.rows(rank));
        time.busiest_rows = std::max(time.busiest_rows, rows);
        time.mean_rows += rows / group_.ranks();
      }
      tuner_->measured(planned, time);
    } catch (const Error& error) {
      const Schedule& incumbent = tuner_->incumbent(0, Direction::kForward);
      tuner_->failed(planned, error.what());
      if (planned.schedule == incumbent) throw;
      group_.recover();
      milliseconds = timed(incumbent, placement);
    }
    const std::vector<uint64_t> seen = checksums();
    run_sequentially(placement);
    differing_ += checksums() != seen;
    return milliseconds;
  }

  double timed(const Schedule& schedule, const Placement& placement) {
    const auto begin = std::chrono::steady_clock::now();
    forward(group_, layer_.config(), schedule, placement, arguments_, {.keep_saved = false});
    group_.synchronize();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

  // Of each rank's y.
  std::vector<uint64_t> checksums() const {
    std::vector<uint64_t> all;
    for (const train::RankMemory& own : fixed_) all.push_back(own.checksums().front());
    return all;
  }

  void run_sequentially(const Placement& placement) {
    forward(group_, layer_.config(), sequential_, placement, arguments_, {.keep_saved = false});
    group_.synchronize();
  }

  Json json() const {
    const TunerSpent spent = tuner_->spent();
    const Schedule& last = tuner_->incumbent(0, Direction::kForward);
    Json json;
    json["operation"] = "layer";
    json["tune"] = "online";
    json["engine"] = engine_name(group_.engine());
    json["steps"] = online_.steps;
    json["calls"] = online_.calls;
    json["budget"] = online_.budget;
    json["begin"] = Json::parse(to_json(begin_));
    json["schedule"] = Json::parse(to_json(last));
    json["changes"] = tune::changed_fields(last, begin_);
    json["ms"] = step_ms_;
    json["calls_compared"] = online_.steps * online_.calls;
    json["calls_differing"] = differing_;
    json["tried_calls"] = spent.tried_calls;
    json["layers_ms"] = spent.layers_milliseconds;
    json["lost_ms"] = spent.lost_milliseconds;
    json["log"] = log_;
    return json;
  }

  std::string table() const {
    const TunerSpent spent = tuner_->spent();
    std::string text = fmt::format("{:>12}  {:>9}\n", "steps", "ms a call");
    const std::size_t part = std::max<std::size_t>(1, step_ms_.size() / 10);
    for (std::size_t first = 0; first < step_ms_.size(); first += part) {
      const std::size_t end = std::min(step_ms_.size(), first + part);
      const auto begin = step_ms_.begin();
      text += fmt::format(
          "{:>12}  {:>9.3f}\n", fmt::format("{}-{}", first + 1, end),
          tune::median({begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(end)}));
    }
    const std::string changed = tune::changed_fields(tuner_->incumbent(0, Direction::kForward), begin_);
    text += fmt::format("now: {}\n", changed.empty() ? "as it began" : changed);
    text += fmt::format("lost to trying: {:.2f} % of the time in layers, in {} calls\n",
                        100 * spent.lost_milliseconds / std::max(spent.layers_milliseconds, 1e-9), spent.tried_calls);
    text += fmt::format("calls whose bytes are not those of sequential execution: {} of {}\n", differing_,
                        online_.steps * online_.calls);
    return text;
  }

  const LayerOptions& layer_;
  const OnlineBench& online_;
  Group group_;
  LayerData data_;
  Schedule begin_, sequential_;
  train::CandidateCheck check_;
  std::vector<train::RankMemory> fixed_;  // inputs and y of each rank, but for the routing
  std::vector<ForwardArguments> arguments_;
  std::vector<Routing> routings_;
  std::unique_ptr<Tuner> tuner_;
  std::vector<double> step_ms_;
  std::vector<std::string> log_;
  int64_t differing_ = 0;
};

}  // namespace

OnlineReport bench_online(const BenchRequest& request, const OnlineBench& online) {
  return OnlineJob(request, online).run();
}

}  // namespace uniep::cli
