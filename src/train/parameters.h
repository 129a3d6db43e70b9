#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/config.h"
#include "uniep/bfloat16.h"

namespace uniep::train {

struct ParameterTensor {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // into the flat arrays
  int64_t count = 0;
  float bound = 0;     // initial values are uniform in [-bound, bound); 0: all ones
  bool decays = true;  // under weight decay
};

// Where each parameter lies in flat fp32 arrays (values, gradients, moments): all dense parameters first, then the
// experts' of each layer in global order, so that a rank's experts are one run. Dense matrices are [inputs, outputs].
class ParameterLayout {
 public:
  struct Block {
    int64_t mixer_norm, mixer_in, mixer_filter, mixer_out, moe_norm, router;  // dense
    int64_t w1, w2;  // experts [E, w1_rows(), H] and [E, H, I], as the library takes them
    int64_t b1, b2;  // with Numerics::bias: [E, w1_rows()] and [E, H]
  };

  explicit ParameterLayout(const ModelConfig& model);

  const std::vector<ParameterTensor>& tensors() const { return tensors_; }
  const Block& block(int64_t layer) const { return blocks_[layer]; }
  int64_t embedding() const { return embedding_; }
  int64_t final_norm() const { return final_norm_; }
  int64_t head() const { return head_; }
  int64_t dense_count() const { return dense_count_; }
  int64_t count() const { return count_; }

 private:
  int64_t add(std::string name, std::vector<int64_t> shape, double deviation, bool decays = true);
  int64_t add_norm(std::string name, int64_t columns);

  std::vector<ParameterTensor> tensors_;
  std::vector<Block> blocks_;
  int64_t embedding_ = 0, final_norm_ = 0, head_ = 0;
  int64_t dense_count_ = 0, count_ = 0;
};

// The parameters that the optimizer keeps, and the copies of them that a step computes with.
class Parameters {
 public:
  explicit Parameters(const ParameterLayout& layout);

  // Values that depend on the seed only.
  void initialise(uint64_t seed);
  // Makes the copies anew; to be called whenever the values have changed.
  void refresh();

  const ParameterLayout& layout() const { return layout_; }
  std::vector<float>& values() { return values_; }
  const std::vector<float>& values() const { return values_; }
  const float* dense(int64_t offset) const { return values_.data() + offset; }
  // A dense matrix with rows and columns exchanged.
  const float* transposed(int64_t offset) const { return transposed_.data() + offset; }
  // An expert tensor, rounded to bf16.
  const BFloat16* experts(int64_t offset) const { return rounded_.data() + (offset - layout_.dense_count()); }

 private:
  const ParameterLayout& layout_;
  std::vector<float> values_;
  std::vector<float> transposed_;
  std::vector<BFloat16> rounded_;
};

}  // namespace uniep::train
