#include "train/expert_layers.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <utility>

namespace uniep::train {
namespace {

GroupOptions group_options(const TrainConfig& config, const ParallelConfig& parallel) {
  check(config, parallel);
  GroupOptions options;
  options.engine = parallel.engine;
  options.devices = parallel.devices;
  options.ranks = parallel.ranks;
  options.workers = parallel.workers;
  return options;
}

LayerConfig layer_config(const TrainConfig& config) {
  LayerConfig layer;
  layer.shape = config.model.shape();
  layer.numerics = config.model.numerics;
  layer.numerics.weight_gradient = WeightGradient::kFloat32;
  return layer;
}

}  // namespace

ExpertLayers::ExpertLayers(const TrainConfig& config, const ParallelConfig& parallel)
    : batch_(config.batch),
      sequence_(config.model.sequence),
      layer_(layer_config(config)),
      group_(group_options(config, parallel)),
      device_arrays_(parallel.device_arrays),
      forward_schedule_(resolve(parallel.schedule, {.direction = Direction::kForward,
                                                    .shape = layer_.shape,
                                                    .numerics = layer_.numerics,
                                                    .machine = group_.machine()})),
      backward_schedule_(resolve(parallel.schedule_backward, {.direction = Direction::kBackward,
                                                              .shape = layer_.shape,
                                                              .numerics = layer_.numerics,
                                                              .machine = group_.machine()})),
      saved_(config.model.layers),
      routing_of_layer_(config.model.layers) {
  if (group_.engine() == EngineKind::kCuda && device_arrays_ == nullptr) {
    throw Error(Status::kInvalidArgument, "device_arrays: null; the cuda engine needs them");
  }
  if (parallel.tune.online) start_tuner(parallel);
  if (parallel.verify_every > 0) start_verifier(parallel.verify_every);
}

void ExpertLayers::start_verifier(int64_t every) {
  VerifierOptions options;
  options.every = every;
  options.budget = 1;
  verifier_ = std::make_unique<Verifier>(group_, options);
}

void ExpertLayers::start_tuner(const ParallelConfig& parallel) {
  const int64_t tokens = (batch_ + group_.ranks() - 1) / group_.ranks() * sequence_;
  check_ = std::make_unique<CandidateCheck>(group_, layer_, tokens, device_arrays_);
  TunerOptions options;
  options.machine = group_.machine();
  options.layers = {{.config = layer_,
                     .tokens = tokens,
                     .forward = forward_schedule_,
                     .backward = backward_schedule_,
                     .fixed_forward = parallel.schedule,
                     .fixed_backward = parallel.schedule_backward}};
  options.budget = parallel.tune.budget;
  options.until = parallel.tune.until;
  options.folder = parallel.tune.folder;
  if (parallel.tune.machine_name) options.machine_name = parallel.tune.machine_name(group_);
  options.check = [this](int, Direction direction, const Schedule& candidate, const Schedule&) {
    return check_->check(direction, candidate, schedule(), schedule_backward());
  };
  options.prepare = [this](int, Direction direction, const Schedule& candidate) {
    return prepare(group_, layer_, candidate, {.direction = direction});
  };
  options.log = [](const std::string& line) { std::cerr << line << '\n'; };
  tuner_ = std::make_unique<Tuner>(std::move(options));
}

void ExpertLayers::begin_step() {
  layer_milliseconds_ = 0;
  if (tuner_ && tuner_->wants_round()) tuner_->begin_round();
}

template <typename Call>
void ExpertLayers::timed(Direction direction, const Placement& placement, const Call& call) {
  const auto run = [&](const Schedule& schedule) {
    const auto begin = std::chrono::steady_clock::now();
    call(schedule);
    group_.synchronize();
    const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begin;
    layer_milliseconds_ += passed.count();
    return passed.count();
  };
  if (!tuner_) {
    run(direction == Direction::kForward ? forward_schedule_ : backward_schedule_);
    return;
  }
  const TunerCall planned = tuner_->schedule(0, direction);
  try {
    CallTime time{run(planned.schedule)};
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      const double rows = static_cast<double>(placement.rows(rank));
      time.busiest_rows = std::max(time.busiest_rows, rows);
      time.mean_rows += rows / group_.ranks();
    }
    tuner_->measured(planned, time);
  } catch (const Error& error) {
    const Schedule& incumbent = tuner_->incumbent(0, direction);
    tuner_->failed(planned, error.what());
    if (planned.schedule == incumbent) throw;
    group_.recover();
    run(incumbent);
  }
}

int64_t ExpertLayers::first_token(int rank) const {
  return batch_ * rank / group_.ranks() * sequence_;
}

std::vector<RankMemory> ExpertLayers::rank_memory() const {
  std::vector<RankMemory> memory;
  for (int rank = 0; rank < group_.ranks(); ++rank) memory.emplace_back(group_.device(rank), device_arrays_);
  return memory;
}

void ExpertLayers::finish(std::vector<RankMemory>& memory) {
  group_.synchronize();
  for (RankMemory& of_rank : memory) of_rank.read_results();
}

bool ExpertLayers::is_verified(int64_t layer, Direction direction) const {
  return verifier_ != nullptr && verifier_->due(std::to_string(layer), direction);
}

std::vector<std::string> ExpertLayers::end_step() {
  if (tuner_) tuner_->step();
  std::vector<std::string> messages;
  if (verifier_ == nullptr) return messages;
  for (const Finding& finding : verifier_->end_step()) messages.push_back(finding.message);
  kept_.clear();
  return messages;
}

int64_t ExpertLayers::checks() const {
  if (verifier_ == nullptr) return 0;
  const VerifierCounts counts = verifier_->counts();
  return counts.forward_checks + counts.backward_checks;
}

std::vector<Routing> ExpertLayers::routings(const int32_t* ids, const float* probs,
                                            std::vector<RankMemory>& memory) const {
  const int64_t topk = layer_.shape.topk;
  std::vector<Routing> of_ranks(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = first_token(rank), tokens = first_token(rank + 1) - first;
    of_ranks[rank].tokens = tokens;
    of_ranks[rank].topk_ids = memory[rank].input(ids + first * topk, tokens * topk);
    of_ranks[rank].probs = memory[rank].input(probs + first * topk, tokens * topk);
  }
  return of_ranks;
}

uniep::Weights ExpertLayers::rank_weights(int rank, const Weights& weights, RankMemory& memory) const {
  const int64_t elements = rank_weight_elements();
  uniep::Weights own;
  own.w1 = memory.input(weights.w1 + rank * rank_w1_elements(), rank_w1_elements());
  own.w2 = memory.input(weights.w2 + rank * elements, elements);
  if (!layer_.numerics.bias) return own;
  own.b1 = memory.input(weights.b1 + rank * rank_b1_elements(), rank_b1_elements());
  own.b2 = memory.input(weights.b2 + rank * rank_b2_elements(), rank_b2_elements());
  return own;
}

void ExpertLayers::forward(int64_t layer, const ForwardArrays& arrays, const Weights& weights) {
  auto [x, ids, probs, y] = arrays;
  const int64_t hidden = layer_.shape.hidden;
  const bool verified = is_verified(layer, Direction::kForward);
  routing_of_layer_[layer] = {ids, probs};
  if (verified) {  // the model uses its memory again
    const int64_t tokens = first_token(group_.ranks()), slots = tokens * layer_.shape.topk;
    kept_x_.assign(x, x + tokens * hidden);
    kept_ids_.assign(ids, ids + slots);
    kept_probs_.assign(probs, probs + slots);
    x = kept_x_.data();
    ids = kept_ids_.data();
    probs = kept_probs_.data();
  }
  std::vector<RankMemory> memory = rank_memory();
  const std::vector<Routing> placed = routings(ids, probs, memory);
  std::vector<ForwardArguments> arguments(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = first_token(rank), tokens = first_token(rank + 1) - first;
    RankMemory& own = memory[rank];
    arguments[rank].x = own.input(x + first * hidden, tokens * hidden);
    arguments[rank].weights = rank_weights(rank, weights, own);
    arguments[rank].y = own.result(y + first * hidden, tokens * hidden);
  }
  saved_[layer] = Saved();  // gives its memory back first
  const Placement placement = place(group_, layer_.shape, placed);
  const Schedule used = schedule();
  timed(Direction::kForward, placement, [&](const Schedule& schedule) {
    saved_[layer] = uniep::forward(group_, layer_, schedule, placement, arguments);
  });
  if (verifier_ != nullptr) {
    verifier_->after_forward({std::to_string(layer), layer_, used, placed}, arguments, saved_[layer]);
  }
  finish(memory);
  if (verified) kept_ = std::move(memory);
}

void ExpertLayers::backward(int64_t layer, const BackwardArrays& arrays, const Weights& weights,
                            const Gradients& gradients) {
  auto [dy, x, dx, dprobs] = arrays;
  const int64_t hidden = layer_.shape.hidden, topk = layer_.shape.topk, elements = rank_weight_elements();
  const bool verified = is_verified(layer, Direction::kBackward);
  if (verified) {
    kept_x_.assign(x, x + first_token(group_.ranks()) * hidden);
    kept_dy_.assign(dy, dy + first_token(group_.ranks()) * hidden);
    x = kept_x_.data();
    dy = kept_dy_.data();
  }
  std::vector<RankMemory> memory = rank_memory();
  std::vector<BackwardArguments> arguments(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = first_token(rank), tokens = first_token(rank + 1) - first;
    RankMemory& own = memory[rank];
    arguments[rank].dy = own.input(dy + first * hidden, tokens * hidden);
    arguments[rank].x = own.input(x + first * hidden, tokens * hidden);
    arguments[rank].weights = rank_weights(rank, weights, own);
    arguments[rank].dx = own.result(dx + first * hidden, tokens * hidden);
    arguments[rank].dprobs = own.result(dprobs + first * topk, tokens * topk);
    WeightGradients& made = arguments[rank].gradients;
    made.dw1 = own.result(gradients.dw1 + rank * rank_w1_elements(), rank_w1_elements());
    made.dw2 = own.result(gradients.dw2 + rank * elements, elements);
    if (!layer_.numerics.bias) continue;
    made.db1 = own.result(gradients.db1 + rank * rank_b1_elements(), rank_b1_elements());
    made.db2 = own.result(gradients.db2 + rank * rank_b2_elements(), rank_b2_elements());
  }
  const Schedule used = schedule_backward();
  timed(Direction::kBackward, saved_[layer].placement(),
        [&](const Schedule& schedule) { uniep::backward(group_, layer_, schedule, saved_[layer], arguments); });
  if (verifier_ != nullptr) {
    const auto [ids, probs] = routing_of_layer_[layer];
    const std::vector<Routing> placed = routings(ids, probs, memory);
    verifier_->after_backward({std::to_string(layer), layer_, used, placed}, arguments);
  }
  finish(memory);
  if (verified) kept_ = std::move(memory);
}

}  // namespace uniep::train
