#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/cuda/gpu_support.h"
#include "tests/cuda/mutant_layers.h"
#include "tests/cuda/small_layer.h"

namespace uniep::cuda::test {

// Forward calls of several batches in a row, for which nobody waits, on GPUs of which now one comes late, now another.
// x is wrong until it is the late one's turn: who does not wait for ranks to arrive, or for their last access, has
// other bytes. They are compared with those of calls one by one.
class QueuedCalls {
 public:
  QueuedCalls(Group& group, const MutantLayer& layer, uint64_t seed);

  // All batches once. Empty, or what was wrong.
  std::string run();

 private:
  static constexpr int kBatches = 4;
  static constexpr int64_t kTokens = 160;

  struct Batch {
    std::vector<std::unique_ptr<SmallLayer>> ranks;
    Placement placement;
    std::vector<uint64_t> expected;
  };

  Saved queue(const Batch& batch, int late_device, uint64_t nanoseconds);
  static std::vector<uint64_t> checksums(const Batch& batch);

  Group& group_;
  LayerConfig config_;
  Schedule schedule_;
  std::vector<std::unique_ptr<Kernels>> kernels_;  // of each GPU
  std::vector<Batch> batches_;
  uniep::test::Random random_;
};

}  // namespace uniep::cuda::test
