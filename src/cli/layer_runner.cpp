#include "cli/layer_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "cli/gathered.h"

namespace uniep::cli {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

template <typename T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace

int64_t LayerData::first_token(int rank) const {
  return std::accumulate(tokens.begin(), tokens.begin() + rank, int64_t{0});
}

bool LayerResult::operator==(const LayerResult& other) const {
  return same_bytes(y, other.y) && same_bytes(z, other.z) && same_bytes(dx, other.dx) &&
         same_bytes(dprobs, other.dprobs) && same_bytes(dw1_bf16, other.dw1_bf16) &&
         same_bytes(dw2_bf16, other.dw2_bf16) && same_bytes(dw1_fp32, other.dw1_fp32) &&
         same_bytes(dw2_fp32, other.dw2_fp32);
}

float start_main_grad(uint64_t index) {
  return static_cast<float>(static_cast<int64_t>(index * 2654435761u % 2048) - 1024) / 1024;
}

LayerRunner::LayerRunner(Group& group, const LayerConfig& config, const LayerData& data, Capacity capacity)
    : group_(group), config_(config), data_(data), capacity_(capacity) {
  if (group_.engine() == EngineKind::kCuda) copy_to_devices();
  place();
}

void LayerRunner::copy_to_devices() {
  const LayerShape& shape = config_.shape;
  const int64_t weights = local_experts() * shape.intermediate * shape.hidden;
  constexpr auto kElement = static_cast<int64_t>(sizeof(BFloat16));
  const auto [first, count] = local_ranks();
  std::vector<int> devices;
  for (int rank = first; rank < first + count; ++rank) {
    const int device = group_.device(rank);
    const int64_t slot = data_.first_token(rank) * shape.topk, tokens = data_.tokens[rank];
    const int64_t slots = tokens * shape.topk, row_bytes = shape.hidden * kElement;
    DeviceRank own;
    own.ids = {device, data_.ids.data() + slot, slots * 4};
    own.probs = {device, data_.probs.data() + slot, slots * 4};
    own.x = {device, data_.x_of(rank), tokens * row_bytes};
    own.w1 = {device, data_.w1_of(rank), 2 * weights * kElement};
    own.w2 = {device, data_.w2_of(rank), weights * kElement};
    own.y = {device, tokens * row_bytes};
    device_ranks_.push_back(std::move(own));
    devices.push_back(device);
  }
  device_timer_ = std::make_unique<cuda::DeviceTimer>(devices);
}

void LayerRunner::place() {
  std::vector<Routing> routings;
  const auto [first_rank, count] = local_ranks();
  for (int local = 0; local < count; ++local) {
    const int rank = first_rank + local;
    const int64_t first = data_.first_token(rank) * data_.shape.topk;
    const void* ids = on_devices() ? device_ranks_[local].ids.data() : data_.ids.data() + first;
    const auto* probs =
        on_devices() ? static_cast<const float*>(device_ranks_[local].probs.data()) : data_.probs.data() + first;
    routings.push_back({data_.tokens[rank], ids, IndexType::kInt32, probs, {}});
  }
  placement_ = uniep::place(group_, config_.shape, routings, capacity_);
}

std::vector<ForwardArguments> LayerRunner::forward_arguments() {
  const auto [first, count] = local_ranks();
  std::vector<ForwardArguments> arguments(count);
  for (int local = 0; local < count; ++local) {
    const int rank = first + local;
    arguments[local].x = data_.x_of(rank);
    arguments[local].y = out_.y.data() + data_.tokens_of({first, local}) * config_.shape.hidden;
    arguments[local].weights.w1 = data_.w1_of(rank);
    arguments[local].weights.w2 = data_.w2_of(rank);
    if (!on_devices()) continue;
    const DeviceRank& own = device_ranks_[local];
    arguments[local].x = static_cast<const BFloat16*>(own.x.data());
    arguments[local].y = static_cast<BFloat16*>(own.y.data());
    arguments[local].weights.w1 = static_cast<const BFloat16*>(own.w1.data());
    arguments[local].weights.w2 = static_cast<const BFloat16*>(own.w2.data());
  }
  return arguments;
}

// On GPUs, the time between two points of their streams.
template <typename Call>
void LayerRunner::timed(Call&& call) {
  const Clock::time_point start = Clock::now();
  if (on_devices()) device_timer_->start();
  call();
  if (on_devices()) device_timer_->stop();
  group_.synchronize();
  milliseconds_ = on_devices() ? device_timer_->milliseconds() : milliseconds_since(start);
  if (has_all_ranks()) return;
  // Also lets the processes begin their next call together.
  const std::vector<double> all = gathered(group_, std::vector<double>{milliseconds_});
  for (const double milliseconds : all) milliseconds_ = std::max(milliseconds_, milliseconds);
}

void LayerRunner::forward(const Schedule& schedule, std::vector<TileEvent>* events) {
  out_.y.assign(data_.tokens_of(local_ranks()) * config_.shape.hidden, BFloat16{0xffff});
  saved_ = Saved();
  const std::vector<ForwardArguments> arguments = forward_arguments();
  for (const DeviceRank& own : device_ranks_) own.y.fill(0xff);
  timed([&] { saved_ = uniep::forward(group_, config_, schedule, placement_, arguments, {events}); });
  if (events != nullptr && !has_all_ranks()) *events = gathered_events(group_, *events);
}

std::vector<BackwardArguments> LayerRunner::backward_arguments() {
  const LayerShape& shape = config_.shape;
  const bool bf16 = config_.numerics.weight_gradient == WeightGradient::kBFloat16;
  const auto [first, count] = local_ranks();
  std::vector<BackwardArguments> arguments(count);
  const std::vector<ForwardArguments> forward = forward_arguments();
  for (int local = 0; local < count; ++local) {
    const int64_t token = data_.tokens_of({first, local});
    const int64_t weights = local * local_experts() * shape.intermediate * shape.hidden;
    BackwardArguments& own = arguments[local];
    own.dy = data_.dy_of(first + local);
    own.x = forward[local].x;
    own.weights = forward[local].weights;
    own.dx = out_.dx.data() + token * shape.hidden;
    own.dprobs = out_.dprobs.data() + token * shape.topk;
    own.gradients.dw1 =
        bf16 ? static_cast<void*>(out_.dw1_bf16.data() + 2 * weights) : out_.dw1_fp32.data() + 2 * weights;
    own.gradients.dw2 = bf16 ? static_cast<void*>(out_.dw2_bf16.data() + weights) : out_.dw2_fp32.data() + weights;
  }
  return arguments;
}

void LayerRunner::backward(const Schedule& schedule, std::vector<TileEvent>* events) {
  const LayerShape& shape = config_.shape;
  const auto [first, count] = local_ranks();
  const int64_t tokens = data_.tokens_of({first, count});
  const int64_t weights_of_rank = local_experts() * shape.intermediate * shape.hidden;
  const int64_t weights = count * weights_of_rank, before = first * weights_of_rank;
  out_.dx.assign(tokens * shape.hidden, BFloat16{0xffff});
  out_.dprobs.assign(tokens * shape.topk, -1.0f);
  if (config_.numerics.weight_gradient == WeightGradient::kBFloat16) {
    out_.dw1_bf16.assign(2 * weights, BFloat16{0xffff});
    out_.dw2_bf16.assign(weights, BFloat16{0xffff});
  } else {
    out_.dw1_fp32.resize(2 * weights);
    out_.dw2_fp32.resize(weights);
    for (std::size_t i = 0; i < out_.dw1_fp32.size(); ++i) out_.dw1_fp32[i] = start_main_grad(2 * before + i);
    for (std::size_t i = 0; i < out_.dw2_fp32.size(); ++i) out_.dw2_fp32[i] = start_main_grad(before + i);
  }
  const std::vector<BackwardArguments> arguments = backward_arguments();
  timed([&] { uniep::backward(group_, config_, schedule, saved_, arguments, {events}); });
  if (events != nullptr && !has_all_ranks()) *events = gathered_events(group_, *events);
}

LayerResult LayerRunner::local_result() const {
  LayerResult result = out_;
  const auto [first, count] = local_ranks();
  for (std::size_t local = 0; local < device_ranks_.size(); ++local) {
    const RankRange before{first, static_cast<int>(local)};
    device_ranks_[local].y.read(
        result.y.data() + data_.tokens_of(before) * config_.shape.hidden,
        data_.tokens[first + local] * config_.shape.hidden * static_cast<int64_t>(sizeof(BFloat16)));
  }
  const int64_t columns = 2 * config_.shape.intermediate;
  for (int64_t expert = first * local_experts(); expert < (first + count) * local_experts(); ++expert) {
    const int rank = static_cast<int>(expert / local_experts());
    const int64_t rows = placement_.expert_rows(expert);
    if (rows == 0) continue;
    const BFloat16* z = saved_.z(rank) + placement_.expert_segment(expert) * columns;
    const std::size_t end = result.z.size();
    result.z.resize(end + static_cast<std::size_t>(rows * columns));
    if (on_devices()) {
      cuda::DeviceArray::read_device(group_.device(rank), z, result.z.data() + end,
                                     rows * columns * static_cast<int64_t>(sizeof(BFloat16)));
    } else {
      std::copy(z, z + rows * columns, result.z.begin() + static_cast<std::ptrdiff_t>(end));
    }
  }
  return result;
}

LayerResult LayerRunner::result() const {
  LayerResult result = local_result();
  if (has_all_ranks()) return result;
  // Tokens and experts follow each other by rank, so global order is the order of the ranks.
  const auto gather = [this](auto& values) { values = gathered(group_, values); };
  gather(result.y);
  gather(result.z);
  gather(result.dx);
  gather(result.dprobs);
  gather(result.dw1_bf16);
  gather(result.dw2_bf16);
  gather(result.dw1_fp32);
  gather(result.dw2_fp32);
  return result;
}

}  // namespace uniep::cli
