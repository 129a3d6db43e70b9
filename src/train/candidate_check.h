#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "train/device_arrays.h"
#include "train/rank_memory.h"
#include "uniep/uniep.h"

namespace uniep::train {

// Calls of the expert layers' own shape on inputs of their own, an eighth of the tokens, to see whether a Schedule
// gives the bytes that another one gives. Nothing of the training is touched.
class CandidateCheck {
 public:
  // `tokens` of a rank. device_arrays: null on the cpu engine alone.
  CandidateCheck(Group& group, const LayerConfig& layer, int64_t tokens, const DeviceArrays* device_arrays);

  // `forward` and `backward` are what runs now.
  TunerCheck check(Direction direction, const Schedule& candidate, const Schedule& forward, const Schedule& backward);

 private:
  struct Results {
    std::vector<uint64_t> checksums;  // of each rank's tensors
    Placement placement;
  };
  // What a rank reads in each check.
  struct Inputs {
    Routing routing;
    const BFloat16 *x = nullptr, *dy = nullptr;
    std::vector<const BFloat16*> w1, w2;
    Weights weights;
  };
  void make_inputs();
  Results run(Direction direction, const Schedule& forward, const Schedule& backward);

  Group& group_;
  LayerConfig layer_;
  int64_t tokens_;
  const DeviceArrays* device_arrays_;
  std::vector<BFloat16> x_, dy_, w1_, w2_, b1_, b2_;  // of one rank: all ranks have the same
  std::vector<int32_t> ids_;
  std::vector<float> probs_;
  std::vector<RankMemory> memory_;  // of the inputs
  std::vector<Inputs> inputs_;
  std::array<std::vector<uint64_t>, 2> expected_;  // by direction
};

}  // namespace uniep::train
