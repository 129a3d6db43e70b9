#pragma once

#include <cstdint>
#include <vector>

#include "uniep/schedule.h"
#include "uniep/shape.h"

namespace uniep::train {

constexpr int64_t kVocabulary = 256;  // bytes
constexpr int64_t kMixerTaps = 16;    // bytes that one mixer looks back, its own included

struct ModelConfig {
  int64_t hidden = 64;
  int64_t intermediate = 64;  // of an expert
  int64_t experts = 8;
  int64_t topk = 2;
  int64_t layers = 2;
  int64_t sequence = 128;  // bytes that one prediction may look at, at most

  LayerShape shape() const { return {hidden, intermediate, experts, topk}; }
};

// What decides the bits of a training run, together with the text and the engine. Ranks, workers and Schedules do not.
struct TrainConfig {
  ModelConfig model;
  int64_t batch = 16;  // sequences of a step, over all ranks
  double learning_rate = 0.01;
  double balance_weight = 0.01;  // of the load-balancing loss
  uint64_t seed = 1;
};

// How a run is spread over ranks and mapped onto the machine.
struct ParallelConfig {
  EngineKind engine = EngineKind::kCpu;  // of the MoE layers; the rest of the model runs on the CPU
  std::vector<int> devices;              // on cuda: rank r runs on entry r mod the length
  int ranks = 1;
  int workers = 0;  // compute units of a rank; 0: the engine's choice
  PartialSchedule schedule;
  PartialSchedule schedule_backward;
  int64_t verify_every = 0;  // steps from one check of a layer to the next; 0: none is checked
};

// Throws Error(kInvalidArgument) that names the first option that is not legal.
void check(const TrainConfig& config);
void check(const TrainConfig& config, const ParallelConfig& parallel);

}  // namespace uniep::train
