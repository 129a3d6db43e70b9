#pragma once

#include <memory>
#include <vector>

#include "cli/bench_ranks.h"
#include "uniep/grouped_gemm.h"

namespace uniep::cli {

// The local ranks' tensors of a measured layer, random, on their GPUs: what its calls are given, and rows that are
// already with their experts, for its GEMMs alone.
class LayerTensors {
 public:
  struct Parts {
    bool backward = false;  // arguments of backward, too
    bool gemms = true;      // what the GEMMs alone need
  };
  LayerTensors(BenchRanks& ranks, const LayerConfig& config, Parts parts);

  const std::vector<ForwardArguments>& forward() const { return forward_; }
  const std::vector<BackwardArguments>& backward() const { return backward_; }
  // FC1 with SwiGLU, and FC2. Without a gate the GEMMs alone, and so in backward.
  void multiply_forward();
  // The gradient of FC2's input with that of SwiGLU, of FC1's input, and of both weights.
  void multiply_backward();

 private:
  struct Rank {
    ExpertRows rows;
    void *xg = nullptr, *z = nullptr, *a = nullptr, *out = nullptr;
    void *dyg = nullptr, *dz = nullptr, *workspace = nullptr;
    float *probs = nullptr, *dprobs = nullptr;  // of rows
  };

  int halves() const;  // of z: gate and up, or 1
  void add_arguments(int rank, bool backward);
  void add_rows(int rank, bool backward);

  BenchRanks& ranks_;
  LayerConfig config_;
  std::vector<ForwardArguments> forward_;  // of local ranks, as all that follows
  std::vector<BackwardArguments> backward_;
  std::vector<Rank> rows_;
  std::vector<std::unique_ptr<GroupedGemm>> gemms_;
};

}  // namespace uniep::cli
