#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/layer_runner.h"

namespace uniep::test {

// splitmix64; the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(next() % (high - low + 1)); }
  bool one_in(int64_t n) { return next() % n == 0; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// For a random backward Schedule: save.* that a forward goes with. With `any` backward may do again what it need not.
void agree_on_saves(PartialSchedule& backward, const Schedule& forward, Random& random, bool any = true);

// A layer with everything that may go wrong in it: ragged and empty ranks, empty experts, unused slots, one expert that
// gets every token, any K and number of experts.
struct RandomLayer {
  int ranks = 1;
  LayerConfig config;
  cli::LayerData data;
  std::string description;
};

constexpr int kFormsOfActivation = 5;

struct RandomLayerLimits {
  std::vector<int> ranks{1, 2, 4, 8};
  int64_t most_local_experts = 32;
  int64_t most_tokens = 48;  // of a rank
  int64_t most_columns = 160;
  std::vector<std::pair<int64_t, int64_t>> columns{};  // H and I are one of these, if any are given
  int64_t fewest_tokens = 0;                           // of a rank; 0: some ranks, or all, have none
  // One of these by the seed, if any are given; then by the seed biases, and the router's weight on the output or on
  // the input, too: kFormsOfActivation of each.
  std::vector<std::string> activations{};
  bool any_activation = false;  // any place of the router's weight, biases; else the default ones
};

RandomLayer random_layer(uint64_t seed, const RandomLayerLimits& limits = {});

// Of a layer that has none yet.
void draw_biases(RandomLayer& layer);

// The same batch with the slots that a map of its experts has: ids ascending in each token, unused slots last.
cli::LayerData with_ascending_slots(const cli::LayerData& data);

// The same batch as the tokens of one rank.
cli::LayerData on_one_rank(const cli::LayerData& data);

// The sequential run on one rank: one launch a stage, one worker.
cli::LayerResult run_sequential(const RandomLayer& layer);

// Runs forward and backward on a group.
cli::LayerResult run_layer(Group& group, const LayerConfig& config, const cli::LayerData& data, const Schedule& forward,
                           const Schedule& backward);

// Names the first tensor and element that differ; empty when all bytes are equal.
std::string difference(const cli::LayerResult& got, const cli::LayerResult& expected);

}  // namespace uniep::test
