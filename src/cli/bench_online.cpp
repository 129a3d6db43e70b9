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
#include "cli/launch_options.h"
#include "cli/layer_inputs.h"
#include "cli/layer_runner.h"
#include "cli/options.h"
#include "cli/rank_agreement.h"
#include "cli/sequential_run.h"
#include "io/hash64.h"
#include "train/candidate_check.h"
#include "train/rank_memory.h"
#include "tune/changed_fields.h"
#include "tune/median.h"
#include "tune/rank_names.h"
#include "uniep/tuner.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

class OnlineJob {
 public:
  OnlineJob(const BenchRequest& request, const OnlineBench& online)
      : layer_(request.layer),
        online_(online),
        group_(make_group(request.layer, request.devices, request.launch)),
        data_(make_layer_data(layer_, {}, false, {group_.first_local_rank(), group_.local_ranks()})),
        begin_(begin_schedule()),
        sequential_(sequential_schedules({begin_, {}}, layer_.config(), group_.machine()).forward),
        check_(group_, layer_.config(), most_tokens(), &device_arrays(),
               [this](const train::PartEnd& own) { return end_on_all_ranks(group_, own); }) {
    require_one_job();
    fixed_.reserve(static_cast<std::size_t>(group_.local_ranks()));
    for (int local = 0; local < group_.local_ranks(); ++local) add_rank(group_.first_local_rank() + local);
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
  // What one rank says of a call.
  struct OwnCall {
    double milliseconds;
    bool differs;  // its y
  };

  void require_one_job() {
    std::string own =
        fmt::format("{};{};{};{};{}", layer_.routing, layer_.seed, online_.steps, online_.calls, to_text(begin_));
    for (const int64_t tokens : data_.tokens) own += fmt::format(";{}", tokens);
    if (const std::vector<int> others = ranks_that_differ(group_, own); !others.empty()) {
      throw Error(
          Status::kInvalidArgument,
          fmt::format("--tune online: {} given another --tokens, --routing, --seed, --steps, --calls, --begin or "
                      "--schedule than rank 0",
                      tune::rank_names(others, "was", "were")));
    }
  }

  void say_progress() const {
    const auto done = std::ssize(step_ms_);
    if (group_.first_local_rank() != 0 || done % std::max<int64_t>(1, online_.steps / 20) != 0) return;
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
    if (group_.local_ranks() < group_.ranks()) {
      options.rank = group_.first_local_rank();
      options.ranks = group_.ranks();
      options.exchange = make_tuner_exchange(group_);
    }
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

  // On the slowest rank, in ms; of a call that a candidate fails the incumbent's.
  double one_call(int64_t number) {
    std::vector<train::RankMemory> memory;
    const Placement placement = place_call(number, memory);
    OwnCall own{timed_call(placement), false};
    const std::vector<uint64_t> seen = checksums();
    run_sequentially(placement);
    own.differs = checksums() != seen;
    OwnCall of_all = own;
    for (const OwnCall& call : told_by_all(group_, own)) {
      of_all.milliseconds = std::max(of_all.milliseconds, call.milliseconds);
      of_all.differs |= call.differs;
    }
    differing_ += of_all.differs;
    return of_all.milliseconds;
  }

  // With a routing of its own, which stays in `memory`.
  Placement place_call(int64_t number, std::vector<train::RankMemory>& memory) {
    LayerOptions routed = layer_;
    routed.seed = io::avalanche64(layer_.seed + static_cast<uint64_t>(number + 1) * io::kGolden64);
    const std::vector<int32_t> ids = make_ids(routed);
    memory.reserve(routings_.size());
    for (std::size_t local = 0; local < routings_.size(); ++local) {
      const int rank = group_.first_local_rank() + static_cast<int>(local);
      train::RankMemory& own = memory.emplace_back(group_.device(rank), &device_arrays());
      Routing& routing = routings_[local];
      routing.topk_ids =
          own.input(ids.data() + data_.first_token(rank) * layer_.shape.topk, routing.tokens * layer_.shape.topk);
    }
    Placement placement = place(group_, layer_.shape, routings_);
    group_.synchronize();
    return placement;
  }

  // A call that fails on one rank counts as failed on all, and all go on or end.
  double timed_call(const Placement& placement) {
    const TunerCall planned = tuner_->schedule(0, Direction::kForward);
    double milliseconds = 0;
    train::PartEnd own;
    try {
      milliseconds = timed(planned.schedule, placement);
    } catch (const Error& error) {
      own = {error.status(), error.what()};
    }
    const train::PartEnd end = end_on_all_ranks(group_, own);
    if (end.status == Status::kOk) {
      tuner_->measured(planned, call_time(milliseconds, placement));
      return milliseconds;
    }
    const Schedule& incumbent = tuner_->incumbent(0, Direction::kForward);
    tuner_->failed(planned, end.text);
    if (planned.schedule == incumbent) throw Error(end.status, end.text);
    group_.recover();
    return timed(incumbent, placement);
  }

  CallTime call_time(double milliseconds, const Placement& placement) const {
    CallTime time{milliseconds};
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      const double rows = static_cast<double>(placement.rows(rank));
      time.busiest_rows = std::max(time.busiest_rows, rows);
      time.mean_rows += rows / group_.ranks();
    }
    return time;
  }

  double timed(const Schedule& schedule, const Placement& placement) {
    const auto begin = std::chrono::steady_clock::now();
    forward(group_, layer_.config(), schedule, placement, arguments_, {.keep_saved = false});
    group_.synchronize();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

  // Of each local rank's y.
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
  std::vector<train::RankMemory> fixed_;  // inputs and y of each local rank, but for the routing
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
