#include "train/trainer.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "io/checksum.h"

namespace uniep::train {
namespace {

constexpr int64_t kEvaluationBatches = 4;

}  // namespace

Trainer::Trainer(const TrainConfig& config, const ParallelConfig& parallel, const Text& text)
    : config_(config),
      text_(text),
      experts_(config, parallel),
      layout_(config.model),
      parameters_(layout_),
      optimizer_(layout_),
      model_(config_, layout_),
      gradients_(layout_.count()) {
  text.check_window(config.model.sequence);
  parameters_.initialise(config.seed);
}

StepRecord Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  const int64_t number = steps_done_ + 1;
  std::vector<const uint8_t*> windows(config_.batch);
  for (int64_t sequence = 0; sequence < config_.batch; ++sequence) {
    windows[sequence] = text_.training_window(config_.model.sequence, config_.seed, number, sequence);
  }
  experts_.begin_step();
  const BatchLoss loss = model_.forward(parameters_, windows, experts_);
  model_.backward(parameters_, experts_, gradients_);
  for (std::string& message : experts_.end_step()) findings_.push_back(std::move(message));
  const double rate = learning_rate_at(number, config_.learning_rate);
  const double norm = optimizer_.update(number, rate, gradients_, parameters_.values());
  if (!std::isfinite(loss.cross_entropy) || !std::isfinite(norm)) {
    throw std::runtime_error(
        fmt::format("training diverged at step {}: loss {}, gradient norm {}; lower --learning-rate", number,
                    loss.cross_entropy, norm));
  }
  parameters_.refresh();
  steps_done_ = number;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const double tokens = static_cast<double>(config_.batch * config_.model.sequence);
  return {number, loss.cross_entropy, loss.balance, tokens / seconds.count(), experts_.layer_milliseconds()};
}

EvaluationRecord Trainer::evaluate() {
  const int64_t count = kEvaluationBatches * config_.batch;
  double sum = 0;
  for (int64_t first = 0; first < count; first += config_.batch) {
    std::vector<const uint8_t*> windows(config_.batch);
    for (int64_t sequence = 0; sequence < config_.batch; ++sequence) {
      windows[sequence] = text_.held_out_window(config_.model.sequence, first + sequence, count);
    }
    sum += model_.forward(parameters_, windows, experts_).cross_entropy;
  }
  return {steps_done_, sum / kEvaluationBatches};
}

TrainState Trainer::state() const {
  return {steps_done_, parameters_.values(), optimizer_.first_moments(), optimizer_.second_moments(),
          experts_.group().engine()};
}

void Trainer::restore(TrainState state) {
  steps_done_ = state.steps_done;
  parameters_.values() = std::move(state.values);
  optimizer_.first_moments() = std::move(state.first_moments);
  optimizer_.second_moments() = std::move(state.second_moments);
  parameters_.refresh();
}

RunRecord train(Trainer& trainer, const RunPlan& plan) {
  RunRecord record;
  const auto evaluate = [&] {
    record.evaluations.push_back(trainer.evaluate());
    if (plan.on_evaluation) plan.on_evaluation(record.evaluations.back());
  };
  if (trainer.steps_done() == 0) evaluate();
  while (trainer.steps_done() < plan.steps) {
    record.steps.push_back(trainer.step());
    if (plan.on_step) plan.on_step(record.steps.back());
    if (plan.after_step) plan.after_step(trainer);
    const int64_t done = trainer.steps_done();
    if (done == plan.steps || (plan.evaluate_every > 0 && done % plan.evaluate_every == 0)) evaluate();
  }
  return record;
}

uint64_t weights_checksum(const Parameters& parameters) {
  return io::checksum(parameters.values().data(), static_cast<int64_t>(parameters.values().size()), 0);
}

}  // namespace uniep::train
