#include "tests/cuda/queued_calls.h"

#include <algorithm>

#include "tests/cuda/delay_arguments.h"

namespace uniep::cuda::test {

QueuedCalls::QueuedCalls(Group& group, const MutantLayer& layer, uint64_t seed)
    : group_(group),
      config_(layer.config),
      schedule_(layer.how.schedule),
      backward_(layer.how.backward),
      dispatch_alone_(layer.dispatch_alone),
      random_(seed) {
  int devices = 1;
  for (int rank = 0; rank < group.ranks(); ++rank) devices = std::max(devices, group.device(rank) + 1);
  for (int device = 0; device < devices; ++device) {
    kernels_.push_back(std::make_unique<Kernels>(device, kernel_folder()));
  }
  for (int i = 0; i < kBatches; ++i) {
    Batch& batch = batches_.emplace_back();
    std::vector<Routing> routings;
    // In every other batch one rank, on either GPU in turn, works on long after the others, at their memory, too.
    const int busiest = i % 2 == 0 ? -1 : (i % 4 == 1 ? 0 : group.ranks() - 1);
    for (int rank = 0; rank < group.ranks(); ++rank) {
      const int number = rank + group.ranks() * (i + kBatches * static_cast<int>(seed % 1000));
      batch.ranks.push_back(std::make_unique<SmallLayer>(config_.shape, group.ranks(), number, group.device(rank),
                                                         kTokens, nullptr, busiest));
      routings.push_back(batch.ranks.back()->routing(kTokens));
    }
    batch.placement = place(group_, config_.shape, routings);
    for (int rank = 0; dispatch_alone_ && rank < group.ranks(); ++rank) {
      batch.rows.emplace_back(group.device(rank), row_bytes(batch, static_cast<std::size_t>(rank)));
    }
  }
  for (int device = 0; device < devices; ++device) queue(batches_.front(), {device, 1}, {});  // loads all kernels
  group_.synchronize();
  for (Batch& batch : batches_) {
    queue(batch, {}, {});
    group_.synchronize();
    batch.expected = checksums(batch);
  }
}

std::string QueuedCalls::run() {
  std::vector<Saved> saved;
  for (const Batch& batch : batches_) saved.push_back(queue(batch, some_delay(), some_delay()));
  group_.synchronize();
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    if (checksums(batches_[i]) != batches_[i].expected) return "batch " + std::to_string(i) + " of those in a row";
  }
  return "";
}

Saved QueuedCalls::queue(const Batch& batch, const Delay& before_forward, const Delay& before_backward) {
  std::vector<ForwardArguments> arguments;
  for (const auto& rank : batch.ranks) {
    if (!dispatch_alone_) rank->poison();
    if (backward_) rank->poison_gradients();
    rank->poison_x();
    arguments.push_back(rank->arguments());
  }
  hold_up(before_forward);
  for (const auto& rank : batch.ranks) rank->restore_x();
  Saved saved;
  if (dispatch_alone_) {
    queue_dispatch(batch);
  } else {
    saved = forward(group_, config_, schedule_, batch.placement, arguments);
  }
  if (backward_) {
    std::vector<BackwardArguments> gradients;
    for (const auto& rank : batch.ranks) gradients.push_back(rank->backward_arguments());
    hold_up(before_backward);
    backward(group_, config_, *backward_, saved, gradients);
  }
  for (const auto& rank : batch.ranks) rank->poison_x();
  return saved;
}

void QueuedCalls::queue_dispatch(const Batch& batch) {
  std::vector<DispatchArguments> arguments;
  for (std::size_t rank = 0; rank < batch.ranks.size(); ++rank) {
    const ForwardArguments of_layer = batch.ranks[rank]->arguments();
    arguments.push_back(
        {.x = of_layer.x, .rows = static_cast<BFloat16*>(batch.rows[rank].data()), .stream = of_layer.stream});
    const ScopedDevice scope(group_.device(static_cast<int>(rank)));
    check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(batch.rows[rank].data()), 0xff,
                                   static_cast<std::size_t>(row_bytes(batch, rank)), batch.ranks[rank]->stream()),
          "poisoning rows");
  }
  dispatch(group_, config_, schedule_, batch.placement, arguments);
}

int64_t QueuedCalls::row_bytes(const Batch& batch, std::size_t rank) const {
  return batch.placement.padded_rows(static_cast<int>(rank)) * config_.shape.hidden *
         static_cast<int64_t>(sizeof(BFloat16));
}

void QueuedCalls::hold_up(const Delay& delay) {
  if (delay.device < 0) return;
  const ScopedDevice scope(delay.device);
  kernels_[static_cast<std::size_t>(delay.device)]->run("delay_kernels.cu", "test_delay", {.threads = 1},
                                                        DelayArguments{delay.nanoseconds});
}

QueuedCalls::Delay QueuedCalls::some_delay() {
  constexpr uint64_t kMostNanoseconds = 300'000;
  return {static_cast<int>(random_.next() % kernels_.size()), random_.next() % kMostNanoseconds};
}

std::vector<uint64_t> QueuedCalls::checksums(const Batch& batch) const {
  std::vector<uint64_t> sums;
  for (std::size_t rank = 0; rank < batch.rows.size(); ++rank) {
    sums.push_back(batch.ranks[rank]->checksum(batch.rows[rank], row_bytes(batch, rank)));
  }
  if (dispatch_alone_) return sums;
  for (const auto& rank : batch.ranks) {
    sums.push_back(rank->checksum(kTokens));
    if (backward_) sums.push_back(rank->gradient_checksum(kTokens));
  }
  return sums;
}

}  // namespace uniep::cuda::test
