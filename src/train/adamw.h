#pragma once

#include <cstdint>
#include <vector>

#include "train/parameters.h"

namespace uniep::train {

// AdamW on the fp32 values: beta 0.9 and 0.95, epsilon 1e-8, decoupled weight decay on everything but the gains of the
// norms, and gradients scaled down to a norm of at most 1 over all parameters.
class AdamW {
 public:
  explicit AdamW(const ParameterLayout& layout);

  // Step number `step` >= 1 with these gradients. Returns the gradients' norm before scaling; when that is not finite,
  // nothing is changed. The same bits on any number of threads.
  double update(int64_t step, double learning_rate, const std::vector<float>& gradients, std::vector<float>& values);

  std::vector<float>& first_moments() { return first_; }
  std::vector<float>& second_moments() { return second_; }
  const std::vector<float>& first_moments() const { return first_; }
  const std::vector<float>& second_moments() const { return second_; }

 private:
  // A run of elements of one tensor, that one task takes.
  struct Chunk {
    int64_t begin, count;
    bool decays;
  };
  double norm(const std::vector<float>& gradients) const;

  std::vector<Chunk> chunks_;
  std::vector<float> first_;
  std::vector<float> second_;
};

// Linear from nothing over the first kWarmupSteps, then constant: a run that is prolonged later has the same steps.
constexpr int64_t kWarmupSteps = 10;
double learning_rate_at(int64_t step, double peak);

}  // namespace uniep::train
