#include "cli/layer_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

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

int64_t LayerData::all_tokens() const {
  return std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
}
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
  place();
}

void LayerRunner::place() {
  std::vector<Routing> routings;
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = data_.first_token(rank) * data_.shape.topk;
    routings.push_back(
        {data_.tokens[rank], data_.ids.data() + first, IndexType::kInt32, data_.probs.data() + first, {}});
  }
  placement_ = uniep::place(group_, config_.shape, routings, capacity_);
}

std::vector<ForwardArguments> LayerRunner::forward_arguments() {
  const LayerShape& shape = config_.shape;
  const int64_t local_experts = shape.experts / group_.ranks();
  std::vector<ForwardArguments> arguments(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = data_.first_token(rank) * shape.hidden;
    const int64_t weights = rank * local_experts * shape.intermediate * shape.hidden;
    arguments[rank].x = data_.x.data() + first;
    arguments[rank].y = out_.y.data() + first;
    arguments[rank].weights.w1 = data_.w1.data() + 2 * weights;
    arguments[rank].weights.w2 = data_.w2.data() + weights;
  }
  return arguments;
}

void LayerRunner::forward(const Schedule& schedule, std::vector<TileEvent>* events) {
  out_.y.assign(data_.x.size(), BFloat16{0xffff});
  saved_ = Saved();
  const std::vector<ForwardArguments> arguments = forward_arguments();
  const Clock::time_point start = Clock::now();
  saved_ = uniep::forward(group_, config_, schedule, placement_, arguments, {events});
  milliseconds_ = milliseconds_since(start);
}

std::vector<BackwardArguments> LayerRunner::backward_arguments() {
  const LayerShape& shape = config_.shape;
  const int64_t local_experts = shape.experts / group_.ranks();
  const bool bf16 = config_.numerics.weight_gradient == WeightGradient::kBFloat16;
  std::vector<BackwardArguments> arguments(group_.ranks());
  const std::vector<ForwardArguments> forward = forward_arguments();
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t token = data_.first_token(rank);
    const int64_t weights = rank * local_experts * shape.intermediate * shape.hidden;
    BackwardArguments& own = arguments[rank];
    own.dy = data_.dy.data() + token * shape.hidden;
    own.x = forward[rank].x;
    own.weights = forward[rank].weights;
    own.dx = out_.dx.data() + token * shape.hidden;
    own.dprobs = out_.dprobs.data() + token * shape.topk;
    own.gradients.dw1 =
        bf16 ? static_cast<void*>(out_.dw1_bf16.data() + 2 * weights) : out_.dw1_fp32.data() + 2 * weights;
    own.gradients.dw2 = bf16 ? static_cast<void*>(out_.dw2_bf16.data() + weights) : out_.dw2_fp32.data() + weights;
  }
  return arguments;
}

void LayerRunner::backward(const Schedule& schedule, std::vector<TileEvent>* events) {
  out_.dx.assign(data_.x.size(), BFloat16{0xffff});
  out_.dprobs.assign(data_.ids.size(), -1.0f);
  if (config_.numerics.weight_gradient == WeightGradient::kBFloat16) {
    out_.dw1_bf16.assign(data_.w1.size(), BFloat16{0xffff});
    out_.dw2_bf16.assign(data_.w2.size(), BFloat16{0xffff});
  } else {
    out_.dw1_fp32.resize(data_.w1.size());
    out_.dw2_fp32.resize(data_.w2.size());
    for (std::size_t i = 0; i < out_.dw1_fp32.size(); ++i) out_.dw1_fp32[i] = start_main_grad(i);
    for (std::size_t i = 0; i < out_.dw2_fp32.size(); ++i) out_.dw2_fp32[i] = start_main_grad(i);
  }
  const std::vector<BackwardArguments> arguments = backward_arguments();
  const Clock::time_point start = Clock::now();
  uniep::backward(group_, config_, schedule, saved_, arguments, {events});
  milliseconds_ = milliseconds_since(start);
}

LayerResult LayerRunner::result() const {
  LayerResult result = out_;
  const int64_t columns = 2 * config_.shape.intermediate;
  const int64_t local_experts = config_.shape.experts / group_.ranks();
  for (int64_t expert = 0; expert < config_.shape.experts; ++expert) {
    const int rank = static_cast<int>(expert / local_experts);
    const int64_t rows = placement_.expert_rows(expert);
    if (rows == 0) continue;
    const BFloat16* z = saved_.z(rank) + placement_.expert_segment(expert) * columns;
    result.z.insert(result.z.end(), z, z + rows * columns);
  }
  return result;
}

}  // namespace uniep::cli
