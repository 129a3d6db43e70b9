#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "train/device_arrays.h"
#include "train/rank_memory.h"
#include "uniep/uniep.h"

namespace uniep::train {

// What a rank's part in something ended with; kOk: well.
struct PartEnd {
  Status status = Status::kOk;
  std::string text = {};
};
// Of all ranks' parts the one that counts, the same on all. Collective.
using AgreeOnEnd = std::function<PartEnd(const PartEnd& own)>;

// Calls of the expert layers' own shape on inputs of their own, an eighth of the tokens, to see whether a Schedule
// gives the bytes that another one gives. Nothing of the training is touched.
class CandidateCheck {
 public:
  // `tokens` of a rank. device_arrays: null on the cpu engine alone. `agree`: null where this process holds all ranks.
  CandidateCheck(Group& group, const LayerConfig& layer, int64_t tokens, const DeviceArrays* device_arrays,
                 AgreeOnEnd agree = nullptr);

  // `forward` and `backward` are what runs now. Of ranks in several processes all are refused or throw, or none is and
  // does; whether bytes are equal each says for its own.
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
  struct Calls;
  int device_of(std::size_t local) const;  // a local rank's GPU
  void make_inputs();
  Calls make_calls(Direction direction);
  void together(const std::function<void()>& work) const;
  Results run(Direction direction, const Schedule& forward, const Schedule& backward);

  Group& group_;
  LayerConfig layer_;
  int64_t tokens_;
  const DeviceArrays* device_arrays_;
  AgreeOnEnd agree_;
  std::vector<BFloat16> x_, dy_, w1_, w2_, b1_, b2_;  // of one rank: all ranks have the same
  std::vector<int32_t> ids_;
  std::vector<float> probs_;
  std::vector<RankMemory> memory_;  // of the inputs
  std::vector<Inputs> inputs_;
  std::array<std::vector<uint64_t>, 2> expected_;  // by direction
};

}  // namespace uniep::train
