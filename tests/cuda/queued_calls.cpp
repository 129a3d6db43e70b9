#include "tests/cuda/queued_calls.h"

#include <algorithm>

#include "tests/cuda/delay_arguments.h"

namespace uniep::cuda::test {

QueuedCalls::QueuedCalls(Group& group, const MutantLayer& layer, uint64_t seed)
    : group_(group), config_(layer.config), schedule_(layer.how.schedule), random_(seed) {
  int devices = 1;
  for (int rank = 0; rank < group.ranks(); ++rank) devices = std::max(devices, group.device(rank) + 1);
  for (int device = 0; device < devices; ++device) {
    kernels_.push_back(std::make_unique<Kernels>(device, kernel_folder()));
  }
  for (int i = 0; i < kBatches; ++i) {
    Batch& batch = batches_.emplace_back();
    std::vector<Routing> routings;
    for (int rank = 0; rank < group.ranks(); ++rank) {
      const int number = rank + group.ranks() * (i + kBatches * static_cast<int>(seed % 1000));
      batch.ranks.push_back(
          std::make_unique<SmallLayer>(config_.shape, group.ranks(), number, group.device(rank), kTokens));
      routings.push_back(batch.ranks.back()->routing(kTokens));
    }
    batch.placement = place(group_, config_.shape, routings);
  }
  for (int device = 0; device < devices; ++device) queue(batches_.front(), device, 1);  // loads all kernels
  group_.synchronize();
  for (Batch& batch : batches_) {
    queue(batch, -1, 0);
    group_.synchronize();
    batch.expected = checksums(batch);
  }
}

std::string QueuedCalls::run() {
  constexpr uint64_t kMostNanoseconds = 300'000;
  std::vector<Saved> saved;
  for (const Batch& batch : batches_) {
    const int late = static_cast<int>(random_.next() % kernels_.size());
    saved.push_back(queue(batch, late, random_.next() % kMostNanoseconds));
  }
  group_.synchronize();
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    if (checksums(batches_[i]) != batches_[i].expected) return "y of batch " + std::to_string(i) + " of those in a row";
  }
  return "";
}

Saved QueuedCalls::queue(const Batch& batch, int late_device, uint64_t nanoseconds) {
  std::vector<ForwardArguments> arguments;
  for (const auto& rank : batch.ranks) {
    rank->poison();
    rank->poison_x();
    arguments.push_back(rank->arguments());
  }
  if (late_device >= 0) {
    const ScopedDevice scope(late_device);
    kernels_[static_cast<std::size_t>(late_device)]->run("delay_kernels.cu", "test_delay", {.threads = 1},
                                                         DelayArguments{nanoseconds});
  }
  for (const auto& rank : batch.ranks) rank->restore_x();
  return forward(group_, config_, schedule_, batch.placement, arguments);
}

std::vector<uint64_t> QueuedCalls::checksums(const Batch& batch) {
  std::vector<uint64_t> sums;
  for (const auto& rank : batch.ranks) sums.push_back(rank->checksum(kTokens));
  return sums;
}

}  // namespace uniep::cuda::test
