#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "train/adamw.h"
#include "train/expert_layers.h"
#include "train/model.h"
#include "train/parameters.h"
#include "train/text.h"

namespace uniep::train {

struct StepRecord {
  int64_t step = 0;  // 1, 2, ...
  double loss = 0;   // cross entropy before the step's update, nats a byte
  double balance_loss = 0;
  double tokens_per_second = 0;
  double layer_milliseconds = 0;  // of all calls of the MoE layers
};

struct EvaluationRecord {
  int64_t step = 0;  // after this step; 0: before the first
  double loss = 0;   // cross entropy on the held-out text
};

// All that decides what follows, but for the configuration and the text. Laid out as the parameters.
struct TrainState {
  int64_t steps_done = 0;
  std::vector<float> values, first_moments, second_moments;
  EngineKind engine = EngineKind::kAuto;  // of the steps done; kAuto: it is not known
};

// Trains one model on one group of ranks. Two trainers with the same TrainConfig and text give the same bits, whatever
// their ParallelConfigs, if their engines are the same.
class Trainer {
 public:
  Trainer(const TrainConfig& config, const ParallelConfig& parallel, const Text& text);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Throws std::runtime_error when the loss or a gradient is not finite; the state is then that of the step before.
  StepRecord step();
  EvaluationRecord evaluate();

  int64_t steps_done() const { return steps_done_; }
  TrainState state() const;
  void restore(TrainState state);

  const Parameters& parameters() const { return parameters_; }
  const TrainConfig& config() const { return config_; }
  // What checks of the layers found, in words, once.
  const std::vector<std::string>& findings() const { return findings_; }
  const ExpertLayers& experts() const { return experts_; }
  const ParameterLayout& layout() const { return layout_; }

 private:
  const TrainConfig config_;
  const Text& text_;
  ExpertLayers experts_;
  ParameterLayout layout_;
  Parameters parameters_;
  AdamW optimizer_;
  Model model_;
  std::vector<float> gradients_;
  std::vector<std::string> findings_;
  int64_t steps_done_ = 0;
};

struct RunPlan {
  int64_t steps = 0;           // the last one
  int64_t evaluate_every = 0;  // 0: before the first step and after the last only
  std::function<void(const StepRecord&)> on_step;
  std::function<void(const EvaluationRecord&)> on_evaluation;
  std::function<void(const Trainer&)> after_step;  // for checkpoints
};

struct RunRecord {
  std::vector<StepRecord> steps;
  std::vector<EvaluationRecord> evaluations;
};

// From where the trainer stands to plan.steps.
RunRecord train(Trainer& trainer, const RunPlan& plan);

// The checksum of all parameters' bits (io::checksum over the flat values).
uint64_t weights_checksum(const Parameters& parameters);

}  // namespace uniep::train
