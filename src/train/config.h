#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "uniep/group.h"
#include "uniep/numerics.h"
#include "uniep/schedule.h"
#include "uniep/shape.h"

namespace uniep::train {

class DeviceArrays;

constexpr int64_t kVocabulary = 256;  // bytes
constexpr int64_t kMixerTaps = 16;    // bytes that one mixer looks back, its own included

struct ModelConfig {
  int64_t hidden = 64;
  int64_t intermediate = 64;  // of an expert
  int64_t experts = 8;
  int64_t topk = 2;
  int64_t layers = 2;
  int64_t sequence = 128;  // bytes that one prediction may look at, at most

  Numerics numerics{};  // activation, router_weight and bias; weight gradients are fp32

  LayerShape shape() const { return {hidden, intermediate, experts, topk}; }
  int64_t w1_rows() const { return (is_gated(numerics.activation) ? 2 : 1) * intermediate; }
};

// What decides the bits of a training run, together with the text and the engine. Ranks, workers and Schedules do not.
struct TrainConfig {
  ModelConfig model;
  int64_t batch = 16;  // sequences of a step, over all ranks
  double learning_rate = 0.01;
  double balance_weight = 0.01;  // of the load-balancing loss
  uint64_t seed = 1;
};

// Tuning while the model trains. It changes no bit.
struct TuneConfig {
  bool online = false;
  double budget = 0.005;  // time lost to trying, as a share of the time in the MoE layers
  int64_t until = 0;      // the step after which Schedules stay; 0: none
  std::string folder;     // where what was found is kept; empty: nowhere
  std::function<std::string(const Group&)> machine_name;  // of the folder's entries
};

// How a run is spread over ranks and mapped onto the machine.
struct ParallelConfig {
  EngineKind engine = EngineKind::kCpu;  // of the MoE layers; the rest of the model runs on the CPU
  std::vector<int> devices;              // on cuda: rank r runs on entry r mod the length
  int ranks = 1;
  int workers = 0;  // compute units of a rank; 0: the engine's choice
  PartialSchedule schedule;
  PartialSchedule schedule_backward;
  TuneConfig tune;
  const DeviceArrays* device_arrays = nullptr;  // for the cuda engine; must outlive the trainer
  int64_t verify_every = 0;                     // steps from one check of a layer to the next; 0: none is checked
};

// Throws Error(kInvalidArgument) that names the first option that is not legal.
void check(const TrainConfig& config);
void check(const TrainConfig& config, const ParallelConfig& parallel);

}  // namespace uniep::train
