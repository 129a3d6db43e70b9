#include <algorithm>
#include <iterator>
#include <utility>

#include "cli/gathered.h"
#include "cli/layer_runner.h"
#include "engine/cuda/kernels/array_checksum.h"
#include "train/parallel_checksum.h"

// Calls of a LayerRunner for their times, and what they gave in one number.
namespace uniep::cli {

void LayerRunner::queue_backward(const Schedule& schedule, const std::vector<BackwardArguments>& arguments,
                                 const CallOptions& options) {
  const PendingWeightGradients work = uniep::backward(group_, config_, schedule, saved_, arguments, options);
  if (!options_.later) return;
  std::vector<WeightGradientArguments> own;
  for (const BackwardArguments& given : arguments) own.push_back({given.gradients, given.stream, 0});
  weight_gradients(group_, work, own);
}

std::function<void()> LayerRunner::call_again(Direction direction, const Schedule& schedule) {
  if (direction == Direction::kBackward) {
    return [this, schedule, arguments = backward_arguments(schedule)] { queue_backward(schedule, arguments, {}); };
  }
  saved_ = Saved();
  return [this, schedule, arguments = forward_arguments()] {
    saved_ = uniep::forward(group_, config_, schedule, placement_, arguments);
  };
}

void LayerRunner::repeat(Direction direction, const Schedule& schedule) {
  timed(call_again(direction, schedule));
}

std::vector<double> LayerRunner::repeat_in_turn(Direction direction, std::span<const Schedule> schedules) {
  std::vector<double> times;
  while (!schedules.empty()) {
    const std::span<const Schedule> now = schedules.first(std::min(device_timers_.size(), schedules.size()));
    schedules = schedules.subspan(now.size());
    call_again(direction, now.front())();  // GPUs have something to do until those that count are queued
    for (std::size_t i = 0; i < now.size(); ++i) {
      const std::function<void()> call = call_again(direction, now[i]);
      device_timers_[i]->start();
      call();
      device_timers_[i]->stop();
    }
    group_.synchronize();
    for (std::size_t i = 0; i < now.size(); ++i) times.push_back(device_timers_[i]->milliseconds());
  }
  return slowest_times(group_, std::move(times));
}

int LayerRunner::spilled_bytes(Direction direction, const Schedule& schedule) const {
  MemoryOptions options{.direction = direction};
  if (options_.later) options.weight_gradients = WeightGradientTime::kLater;
  return group_.implementation().spilled_bytes(config_, schedule, options);
}

uint64_t LayerRunner::checksum(Direction direction) const {
  uint64_t sum = 0, index = 0;
  const auto add = [&](const auto* values, int64_t count) {
    sum += train::parallel_checksum(values, count, index);
    index += static_cast<uint64_t>(count);
  };
  const auto add_array = [&](const cuda::DeviceArray& array) {
    sum += cuda::array_checksum(array.device(), array.data(), array.bytes(), index);
    index += static_cast<uint64_t>(array.bytes() + 3) / 4;
  };
  const auto add_all = [&](const ExpertArrays& arrays) {
    for (const cuda::DeviceArray& array : arrays) add_array(array);
  };
  for (const DeviceRank& own : device_ranks_) {
    if (direction == Direction::kForward) {
      add_array(own.y);
      continue;
    }
    add_array(own.dx);
    add_array(own.dprobs);
    for (const ExpertArrays* arrays : {&own.dw1, &own.dw1_up, &own.dw2, &own.db1, &own.db2}) add_all(*arrays);
  }
  if (on_devices()) return sum;
  const auto add_values = [&](const auto&... values) { (add(values.data(), std::ssize(values)), ...); };
  if (direction == Direction::kForward) {
    add_values(out_.y);
  } else {
    add_values(out_.dx, out_.dprobs, out_.dw1_bf16, out_.dw2_bf16, out_.dw1_fp32, out_.dw2_fp32, out_.db1_bf16,
               out_.db2_bf16, out_.db1_fp32, out_.db2_fp32);
  }
  return sum;
}

}  // namespace uniep::cli
