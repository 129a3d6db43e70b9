#pragma once

#include <span>
#include <string>
#include <vector>

#include "uniep/layer.h"
#include "verify/sums.h"

// What a call was given, as the caller still has it.
namespace uniep::verify {

struct ExpertWeights {
  const BFloat16 *gate = nullptr, *up = nullptr;  // [I, H] each
  const BFloat16* w2 = nullptr;                   // [H, I]
};

// Of all ranks.
struct Inputs {
  LayerConfig config;
  Direction direction = Direction::kForward;
  std::vector<Routing> routings;
  std::vector<const BFloat16*> x, dy;  // [T, H]; dy in backward
  std::vector<ExpertWeights> experts;  // [E]

  int ranks() const { return static_cast<int>(routings.size()); }
  int64_t local_experts() const { return config.shape.experts / ranks(); }
  const ExpertWeights& expert(int64_t expert) const { return experts[static_cast<std::size_t>(expert)]; }
  void add_experts(const Weights& of_rank);  // of each rank in turn, behind the routings
};

// A rank's routing on the host, a map as the slots that it stands for.
struct HostRouting {
  std::vector<int32_t> ids;  // [T, K]
  std::vector<float> probs;  // [T, K]; of an unused slot 0
};
std::vector<HostRouting> read_routings(const Group& group, const Inputs& inputs);

// Checksums of everything that the call reads.
Sums sum_inputs(const Group& group, const Inputs& inputs);

// Writes FILE.safetensors (x, dy, probs, w1, w2) and FILE.npy (ids) for `uniep run`, whose command line is in the
// metadata. Gives the first one's name back.
std::string write_inputs(const Group& group, const Inputs& inputs, const std::string& path_without_ending);

}  // namespace uniep::verify
