#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/cuda/gpu_support.h"
#include "tests/cuda/mutant_layers.h"
#include "tests/cuda/small_layer.h"

namespace uniep::cuda::test {

// Calls of several batches in a row, forward or forward and backward, for which nobody waits, on GPUs of which now one
// comes late, now another. x is wrong until it is the late one's turn, and again behind the last call: who does not
// wait for ranks to arrive, or for their last access, has other bytes. They are compared with those of calls one by
// one. Or so many calls of dispatch() alone, which end with their last pull.
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
    std::vector<DeviceArray> rows;  // of each rank, that dispatch() alone fills
    std::vector<uint64_t> expected;
  };

  // On which GPU and for how long a call is held up; none: -1.
  struct Delay {
    int device = -1;
    uint64_t nanoseconds = 0;
  };

  // Lives until the batch is through.
  Saved queue(const Batch& batch, const Delay& before_forward, const Delay& before_backward);
  void queue_dispatch(const Batch& batch);
  int64_t row_bytes(const Batch& batch, std::size_t rank) const;
  void hold_up(const Delay& delay);
  Delay some_delay();
  std::vector<uint64_t> checksums(const Batch& batch) const;

  Group& group_;
  LayerConfig config_;
  Schedule schedule_;
  std::optional<Schedule> backward_;
  bool dispatch_alone_;
  std::vector<std::unique_ptr<Kernels>> kernels_;  // of each GPU
  std::vector<Batch> batches_;
  uniep::test::Random random_;
};

}  // namespace uniep::cuda::test
