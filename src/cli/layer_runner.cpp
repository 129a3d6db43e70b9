#include "cli/layer_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cli/gathered.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kElement = static_cast<int64_t>(sizeof(BFloat16));

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

template <typename T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

using Halves = std::pair<std::vector<std::byte>, std::vector<std::byte>>;

// From [experts, 2, half_bytes] to two of [experts, half_bytes], and back.
Halves split_halves(const void* whole, int64_t experts, int64_t half_bytes) {
  const auto* const from = static_cast<const std::byte*>(whole);
  Halves halves;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const std::byte* const gate = from + 2 * expert * half_bytes;
    halves.first.insert(halves.first.end(), gate, gate + half_bytes);
    halves.second.insert(halves.second.end(), gate + half_bytes, gate + 2 * half_bytes);
  }
  return halves;
}
void join_halves(const std::byte* gate, const std::byte* up, int64_t experts, int64_t half_bytes, std::byte* whole) {
  for (int64_t expert = 0; expert < experts; ++expert) {
    std::copy_n(gate + expert * half_bytes, half_bytes, whole + 2 * expert * half_bytes);
    std::copy_n(up + expert * half_bytes, half_bytes, whole + (2 * expert + 1) * half_bytes);
  }
}

template <typename T>
std::vector<T> addresses(T first, int64_t count, int64_t bytes) {
  using Byte = std::conditional_t<std::is_same_v<T, void*>, std::byte, const std::byte>;
  std::vector<T> each;
  for (int64_t i = 0; i < count; ++i) each.push_back(reinterpret_cast<T>(reinterpret_cast<Byte*>(first) + i * bytes));
  return each;
}

}  // namespace

int64_t LayerData::first_token(int rank) const {
  return std::accumulate(tokens.begin(), tokens.begin() + rank, int64_t{0});
}

std::vector<std::string> LayerResult::differences(const LayerResult& other) const {
  std::vector<std::string> names;
  const auto note = [&names](const char* name, bool same) {
    if (!same) names.emplace_back(name);
  };
  note("y", same_bytes(y, other.y));
  note("z", !has_z || !other.has_z || same_bytes(z, other.z));
  note("dx", same_bytes(dx, other.dx));
  note("dprobs", same_bytes(dprobs, other.dprobs));
  note("dw1", same_bytes(dw1_bf16, other.dw1_bf16) && same_bytes(dw1_fp32, other.dw1_fp32));
  note("dw2", same_bytes(dw2_bf16, other.dw2_bf16) && same_bytes(dw2_fp32, other.dw2_fp32));
  note("db1", same_bytes(db1_bf16, other.db1_bf16) && same_bytes(db1_fp32, other.db1_fp32));
  note("db2", same_bytes(db2_bf16, other.db2_bf16) && same_bytes(db2_fp32, other.db2_fp32));
  return names;
}

float start_main_grad(uint64_t index) {
  return static_cast<float>(static_cast<int64_t>(index * 2654435761u % 2048) - 1024) / 1024;
}

LayerRunner::LayerRunner(Group& group, const LayerConfig& config, const LayerData& data, const RunnerOptions& options)
    : group_(group),
      config_(config),
      data_(data),
      options_(options),
      addresses_(static_cast<std::size_t>(group.local_ranks())) {
  host_ranks_.resize(addresses_.size());
  for (int local = 0; local < group.local_ranks(); ++local) make_host_rank(local);
  if (group_.engine() == EngineKind::kCuda) copy_to_devices();
  place();
}

void LayerRunner::make_host_rank(int local) {
  const LayerShape& shape = config_.shape;
  const int rank = local_ranks().first + local;
  HostRank& own = host_ranks_[local];
  if (options_.apart) {
    std::tie(own.gate, own.up) = split_halves(data_.w1_of(rank), local_experts(), expert_elements() * kElement);
  }
  if (!options_.dense) return;
  const int64_t first = data_.first_token(rank), tokens = data_.tokens[rank];
  own.map.assign(tokens * shape.experts, 0);
  own.dense_probs.assign(own.map.size(), std::numeric_limits<float>::quiet_NaN());
  for (int64_t entry = first * shape.topk; entry < (first + tokens) * shape.topk; ++entry) {
    if (data_.ids[entry] < 0) continue;
    const int64_t at = (entry / shape.topk - first) * shape.experts + data_.ids[entry];
    own.map[at] = 1;
    own.dense_probs[at] = data_.probs[entry];
  }
}

// `values` null: memory alone.
LayerRunner::ExpertArrays LayerRunner::split(int device, const void* values, int64_t bytes) const {
  const int64_t parts = options_.by_address ? local_experts() : 1, part = bytes / parts;
  ExpertArrays arrays;
  for (int64_t i = 0; i < parts; ++i) {
    if (values == nullptr) {
      arrays.emplace_back(device, part);
    } else {
      arrays.emplace_back(device, static_cast<const char*>(values) + i * part, part);
    }
  }
  return arrays;
}

void LayerRunner::copy_to_devices() {
  const LayerShape& shape = config_.shape;
  const int64_t weights = local_experts() * expert_elements();
  const auto [first, count] = local_ranks();
  std::vector<int> devices;
  for (int rank = first; rank < first + count; ++rank) {
    const int device = group_.device(rank);
    const int64_t slot = data_.first_token(rank) * shape.topk, tokens = data_.tokens[rank];
    const int64_t slots = tokens * shape.topk, row_bytes = shape.hidden * kElement;
    DeviceRank own;
    const HostRank& host = host_ranks_[rank - first];
    if (options_.dense) {
      own.ids = {device, host.map.data(), tokens * shape.experts};
      own.probs = {device, host.dense_probs.data(), tokens * shape.experts * 4};
    } else {
      own.ids = {device, data_.ids.data() + slot, slots * 4};
      own.probs = {device, data_.probs.data() + slot, slots * 4};
    }
    own.x = {device, data_.x_of(rank), tokens * row_bytes};
    if (options_.apart) {
      own.w1 = split(device, host.gate.data(), weights * kElement);
      own.w1_up = split(device, host.up.data(), weights * kElement);
    } else {
      own.w1 = split(device, data_.w1_of(rank), halves() * weights * kElement);
    }
    own.w2 = split(device, data_.w2_of(rank), weights * kElement);
    if (config_.numerics.bias) {
      own.b1 = split(device, data_.b1_of(rank), local_experts() * halves() * shape.intermediate * kElement);
      own.b2 = split(device, data_.b2_of(rank), local_experts() * shape.hidden * kElement);
    }
    own.y = {device, tokens * row_bytes};
    device_ranks_.push_back(std::move(own));
    devices.push_back(device);
  }
  constexpr int kCallsUnderWay = 16;
  for (int i = 0; i < kCallsUnderWay; ++i) device_timers_.push_back(std::make_unique<cuda::DeviceTimer>(devices));
}

Routing LayerRunner::routing(int local) {
  const int rank = local_ranks().first + local;
  const int64_t first = data_.first_token(rank) * data_.shape.topk;
  const HostRank& host = host_ranks_[local];
  const void* ids = options_.dense ? static_cast<const void*>(host.map.data()) : data_.ids.data() + first;
  const float* probs = options_.dense ? host.dense_probs.data() : data_.probs.data() + first;
  if (on_devices()) ids = device_ranks_[local].ids.data();
  if (on_devices()) probs = static_cast<const float*>(device_ranks_[local].probs.data());
  if (!options_.dense) return {data_.tokens[rank], ids, IndexType::kInt32, probs, {}};
  // A map of no tokens is a map all the same.
  static constexpr uint8_t kNoTokens = 0;
  const auto* const map = static_cast<const uint8_t*>(ids);
  return {data_.tokens[rank], nullptr, IndexType::kInt32, probs, {}, map != nullptr ? map : &kNoTokens};
}

void LayerRunner::place() {
  std::vector<Routing> routings;
  for (int local = 0; local < local_ranks().count; ++local) routings.push_back(routing(local));
  placement_ = uniep::place(group_, config_.shape, routings, options_.capacity);
}

std::vector<const BFloat16*> LayerRunner::collect(const ExpertArrays& arrays) {
  std::vector<const BFloat16*> each;
  for (const cuda::DeviceArray& array : arrays) each.push_back(static_cast<const BFloat16*>(array.data()));
  return each;
}

std::vector<void*> LayerRunner::collect_outputs(const ExpertArrays& arrays) {
  std::vector<void*> each;
  for (const cuda::DeviceArray& array : arrays) each.push_back(array.data());
  return each;
}

Weights LayerRunner::weights(int local) {
  const int rank = local_ranks().first + local;
  RankAddresses& experts = addresses_[local];
  Weights weights;
  if (!on_devices()) {
    const int64_t bytes = expert_elements() * kElement;
    const HostRank& host = host_ranks_[local];
    const auto half = [&](const std::vector<std::byte>& values) {
      return addresses(reinterpret_cast<const BFloat16*>(values.data()), local_experts(), bytes);
    };
    experts.w1 = options_.apart ? half(host.gate) : addresses(data_.w1_of(rank), local_experts(), halves() * bytes);
    if (options_.apart) experts.w1_up = half(host.up);
    experts.w2 = addresses(data_.w2_of(rank), local_experts(), bytes);
  } else {
    experts.w1 = collect(device_ranks_[local].w1);
    experts.w1_up = collect(device_ranks_[local].w1_up);
    experts.w2 = collect(device_ranks_[local].w2);
  }
  if (options_.by_address) {
    weights.w1_experts = experts.w1.data();
    weights.w2_experts = experts.w2.data();
    if (options_.apart) weights.w1_up_experts = experts.w1_up.data();
  } else {
    weights.w1 = experts.w1.front();
    weights.w2 = experts.w2.front();
    if (options_.apart) weights.w1_up = experts.w1_up.front();
  }
  if (config_.numerics.bias) add_biases(local, weights);
  return weights;
}

void LayerRunner::add_biases(int local, Weights& weights) {
  const int rank = local_ranks().first + local;
  const int64_t columns = halves() * config_.shape.intermediate;
  RankAddresses& experts = addresses_[local];
  if (on_devices()) {
    experts.b1 = collect(device_ranks_[local].b1);
    experts.b2 = collect(device_ranks_[local].b2);
  } else {
    experts.b1 = addresses(data_.b1_of(rank), local_experts(), columns * kElement);
    experts.b2 = addresses(data_.b2_of(rank), local_experts(), config_.shape.hidden * kElement);
  }
  if (options_.by_address) {
    weights.b1_experts = experts.b1.data();
    weights.b2_experts = experts.b2.data();
  } else {
    weights.b1 = experts.b1.front();
    weights.b2 = experts.b2.front();
  }
}

std::vector<ForwardArguments> LayerRunner::forward_arguments() {
  const auto [first, count] = local_ranks();
  std::vector<ForwardArguments> arguments(count);
  for (int local = 0; local < count; ++local) {
    arguments[local].x = data_.x_of(first + local);
    arguments[local].y = out_.y.data() + data_.tokens_of({first, local}) * config_.shape.hidden;
    arguments[local].weights = weights(local);
    if (!on_devices()) continue;
    arguments[local].x = static_cast<const BFloat16*>(device_ranks_[local].x.data());
    arguments[local].y = static_cast<BFloat16*>(device_ranks_[local].y.data());
  }
  return arguments;
}

void LayerRunner::timed(const std::function<void()>& call) {
  const Clock::time_point start = Clock::now();
  if (on_devices()) device_timers_.front()->start();
  call();
  if (on_devices()) device_timers_.front()->stop();
  group_.synchronize();
  milliseconds_ = on_devices() ? device_timers_.front()->milliseconds() : milliseconds_since(start);
  // Also lets the processes begin their next call together.
  milliseconds_ = slowest_times(group_, {milliseconds_}).front();
}

void LayerRunner::forward(const Schedule& schedule, std::vector<TileEvent>* events, CallTimer* timer) {
  out_.y.assign(data_.tokens_of(local_ranks()) * config_.shape.hidden, BFloat16{0xffff});
  out_.has_z = schedule.save_z == SaveZ::kKeep;
  saved_ = Saved();
  const std::vector<ForwardArguments> arguments = forward_arguments();
  for (const DeviceRank& own : device_ranks_) own.y.fill(0xff);
  timed([&] { saved_ = uniep::forward(group_, config_, schedule, placement_, arguments, {events, timer}); });
  if (events != nullptr && !has_all_ranks()) *events = gathered_events(group_, *events);
}

// What the gradients of a local rank's experts hold before the call, on its device.
void LayerRunner::start_gradients(int local) {
  const int rank = local_ranks().first + local, device = group_.device(rank);
  DeviceRank& own = device_ranks_[local];
  const auto start = [&](ExpertArrays& arrays, int64_t elements) {
    arrays.clear();
    if (has_bf16_gradients()) {
      arrays = split(device, nullptr, elements * kElement);
      for (const cuda::DeviceArray& array : arrays) array.fill(0xff);
      return;
    }
    std::vector<float> values(elements);
    for (int64_t i = 0; i < elements; ++i) values[i] = options_.main_grad(rank * elements + i);
    arrays = split(device, values.data(), elements * static_cast<int64_t>(sizeof(float)));
  };
  const int64_t elements = local_experts() * expert_elements();
  start(own.dw2, elements);
  if (config_.numerics.bias) {
    start(own.db1, local_experts() * halves() * config_.shape.intermediate);
    start(own.db2, local_experts() * config_.shape.hidden);
  }
  if (!options_.apart) return start(own.dw1, halves() * elements);
  // What the results hold is what gradients start from.
  split_gradients(local);
  own.dw1 = split(device, host_ranks_[local].dgate.data(), elements * gradient_bytes());
  own.dw1_up = split(device, host_ranks_[local].dup.data(), elements * gradient_bytes());
}

std::byte* LayerRunner::dw1_of(LayerResult& result, int local) const {
  std::byte* const all = has_bf16_gradients() ? reinterpret_cast<std::byte*>(result.dw1_bf16.data())
                                              : reinterpret_cast<std::byte*>(result.dw1_fp32.data());
  return all + local * (halves() * local_experts() * expert_elements() * gradient_bytes());
}

void LayerRunner::split_gradients(int local) {
  HostRank& own = host_ranks_[local];
  std::tie(own.dgate, own.dup) =
      split_halves(dw1_of(out_, local), local_experts(), expert_elements() * gradient_bytes());
}

void LayerRunner::join_gradients(int local) {
  const HostRank& own = host_ranks_[local];
  join_halves(own.dgate.data(), own.dup.data(), local_experts(), expert_elements() * gradient_bytes(),
              dw1_of(out_, local));
}

// From [T, E] to the batch's slots. Throws Error(kInternal) where a prob without a row has a gradient.
void LayerRunner::gather_dense_dprobs(int local, const std::vector<float>& dense, LayerResult& result) const {
  const LayerShape& shape = config_.shape;
  const RankRange before{local_ranks().first, local};
  const int64_t first = data_.first_token(before.first + local), at = data_.tokens_of(before);
  std::vector<float> left = dense;
  for (int64_t entry = 0; entry < data_.tokens[before.first + local] * shape.topk; ++entry) {
    const int32_t expert = data_.ids[first * shape.topk + entry];
    float& to = result.dprobs[at * shape.topk + entry];
    to = expert < 0 ? 0.0f : std::exchange(left[entry / shape.topk * shape.experts + expert], 0.0f);
  }
  const std::vector<float> zeros(left.size(), 0.0f);
  if (!same_bytes(left, zeros)) throw Error(Status::kInternal, "dprobs: not +0 where the map is 0");
}

WeightGradients LayerRunner::gradients(int local) {
  RankAddresses& experts = addresses_[local];
  if (on_devices()) {
    experts.dw1 = collect_outputs(device_ranks_[local].dw1);
    experts.dw1_up = collect_outputs(device_ranks_[local].dw1_up);
    experts.dw2 = collect_outputs(device_ranks_[local].dw2);
  } else {
    const int64_t bytes = expert_elements() * gradient_bytes(), experts_here = local_experts();
    std::byte* const dw2 = has_bf16_gradients() ? reinterpret_cast<std::byte*>(out_.dw2_bf16.data())
                                                : reinterpret_cast<std::byte*>(out_.dw2_fp32.data());
    experts.dw2 = addresses(static_cast<void*>(dw2 + local * experts_here * bytes), experts_here, bytes);
    if (options_.apart) {
      split_gradients(local);
      experts.dw1 = addresses(static_cast<void*>(host_ranks_[local].dgate.data()), experts_here, bytes);
      experts.dw1_up = addresses(static_cast<void*>(host_ranks_[local].dup.data()), experts_here, bytes);
    } else {
      experts.dw1 = addresses(static_cast<void*>(dw1_of(out_, local)), experts_here, halves() * bytes);
    }
  }
  WeightGradients gradients;
  if (options_.by_address) {
    gradients.dw1_experts = experts.dw1.data();
    gradients.dw2_experts = experts.dw2.data();
    if (options_.apart) gradients.dw1_up_experts = experts.dw1_up.data();
  } else {
    gradients.dw1 = experts.dw1.front();
    gradients.dw2 = experts.dw2.front();
    if (options_.apart) gradients.dw1_up = experts.dw1_up.front();
  }
  if (config_.numerics.bias) add_bias_gradients(local, gradients);
  return gradients;
}

void LayerRunner::add_bias_gradients(int local, WeightGradients& gradients) {
  const int64_t count = local_experts();
  const auto each = [&](std::vector<BFloat16>& bf16, std::vector<float>& fp32, int64_t columns) {
    std::byte* const all =
        has_bf16_gradients() ? reinterpret_cast<std::byte*>(bf16.data()) : reinterpret_cast<std::byte*>(fp32.data());
    const int64_t bytes = columns * gradient_bytes();
    return addresses(static_cast<void*>(all + local * count * bytes), count, bytes);
  };
  RankAddresses& experts = addresses_[local];
  if (on_devices()) {
    experts.db1 = collect_outputs(device_ranks_[local].db1);
    experts.db2 = collect_outputs(device_ranks_[local].db2);
  } else {
    experts.db1 = each(out_.db1_bf16, out_.db1_fp32, halves() * config_.shape.intermediate);
    experts.db2 = each(out_.db2_bf16, out_.db2_fp32, config_.shape.hidden);
  }
  if (options_.by_address) {
    gradients.db1_experts = experts.db1.data();
    gradients.db2_experts = experts.db2.data();
  } else {
    gradients.db1 = experts.db1.front();
    gradients.db2 = experts.db2.front();
  }
}

std::vector<BackwardArguments> LayerRunner::backward_arguments(const Schedule& schedule) {
  const LayerShape& shape = config_.shape;
  const auto [first, count] = local_ranks();
  std::vector<BackwardArguments> arguments(count);
  const std::vector<ForwardArguments> forward = forward_arguments();
  for (int local = 0; local < count; ++local) {
    const int64_t token = data_.tokens_of({first, local});
    BackwardArguments& own = arguments[local];
    own.dy = data_.dy_of(first + local);
    if (schedule.save_xg == SaveXg::kRedispatch) own.x = forward[local].x;
    own.weights = forward[local].weights;
    own.dx = out_.dx.data() + token * shape.hidden;
    own.dprobs = out_.dprobs.data() + token * shape.topk;
    own.gradients = gradients(local);
    own.weight_gradients = options_.later ? WeightGradientTime::kLater : WeightGradientTime::kNow;
    if (options_.dense) {
      host_ranks_[local].dense_dprobs.assign(host_ranks_[local].map.size(), -1.0f);
      own.dprobs = host_ranks_[local].dense_dprobs.data();
    }
    if (!on_devices()) continue;
    own.dy = static_cast<const BFloat16*>(device_ranks_[local].dy.data());
    own.dx = static_cast<BFloat16*>(device_ranks_[local].dx.data());
    own.dprobs = static_cast<float*>(device_ranks_[local].dprobs.data());
  }
  return arguments;
}

// What the results hold before the call.
void LayerRunner::start_host_gradients() {
  const auto [first, count] = local_ranks();
  const auto start = [&, first = first, count = count](std::vector<BFloat16>& bf16, std::vector<float>& fp32,
                                                       int64_t elements_of_expert) {
    const int64_t of_rank = local_experts() * elements_of_expert;
    if (has_bf16_gradients()) {
      bf16.assign(count * of_rank, BFloat16{0xffff});
      return;
    }
    fp32.resize(count * of_rank);
    if (on_devices() && !options_.apart) return;
    for (std::size_t i = 0; i < fp32.size(); ++i) fp32[i] = options_.main_grad(first * of_rank + i);
  };
  start(out_.dw1_bf16, out_.dw1_fp32, halves() * expert_elements());
  start(out_.dw2_bf16, out_.dw2_fp32, expert_elements());
  if (!config_.numerics.bias) return;
  start(out_.db1_bf16, out_.db1_fp32, halves() * config_.shape.intermediate);
  start(out_.db2_bf16, out_.db2_fp32, config_.shape.hidden);
}

void LayerRunner::backward(const Schedule& schedule, std::vector<TileEvent>* events, CallTimer* timer) {
  const LayerShape& shape = config_.shape;
  const auto [first, count] = local_ranks();
  const int64_t tokens = data_.tokens_of({first, count});
  out_.dx.assign(tokens * shape.hidden, BFloat16{0xffff});
  out_.dprobs.assign(tokens * shape.topk, -1.0f);
  start_host_gradients();
  for (std::size_t local = 0; local < device_ranks_.size(); ++local) {
    const int rank = first + static_cast<int>(local), device = group_.device(rank);
    DeviceRank& own = device_ranks_[local];
    own.dy = {device, data_.dy_of(rank), data_.tokens[rank] * shape.hidden * kElement};
    own.dx = {device, data_.tokens[rank] * shape.hidden * kElement};
    own.dprobs = {device, data_.tokens[rank] * dprobs_of_token() * static_cast<int64_t>(sizeof(float))};
    own.dx.fill(0xff);
    own.dprobs.fill(0xff);
    start_gradients(static_cast<int>(local));
  }
  const std::vector<BackwardArguments> arguments = backward_arguments(schedule);
  timed([&] { queue_backward(schedule, arguments, {events, timer}); });
  for (int local = 0; local < count && !on_devices(); ++local) {
    if (options_.apart) join_gradients(local);
    if (options_.dense) gather_dense_dprobs(local, host_ranks_[local].dense_dprobs, out_);
  }
  if (events != nullptr && !has_all_ranks()) *events = gathered_events(group_, *events);
}

void LayerRunner::read_gradients(int local, LayerResult& result) const {
  const RankRange before{local_ranks().first, local};
  const DeviceRank& own = device_ranks_[local];
  const int64_t token = data_.tokens_of(before), tokens = data_.tokens[before.first + local];
  own.dx.read(result.dx.data() + token * config_.shape.hidden, tokens * config_.shape.hidden * kElement);
  const int64_t dprobs_bytes = tokens * dprobs_of_token() * static_cast<int64_t>(sizeof(float));
  if (options_.dense) {
    std::vector<float> dense(tokens * dprobs_of_token());
    own.dprobs.read(dense.data(), dprobs_bytes);
    gather_dense_dprobs(local, dense, result);
  } else {
    own.dprobs.read(result.dprobs.data() + token * config_.shape.topk, dprobs_bytes);
  }
  const auto read = [&](const ExpertArrays& arrays, int64_t elements, auto& bf16, auto& fp32) {
    char* const values =
        has_bf16_gradients() ? reinterpret_cast<char*>(bf16.data()) : reinterpret_cast<char*>(fp32.data());
    const int64_t bytes = elements * gradient_bytes(), part = bytes / static_cast<int64_t>(arrays.size());
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      arrays[i].read(values + local * bytes + static_cast<int64_t>(i) * part, part);
    }
  };
  if (options_.apart) {
    const int64_t half = expert_elements() * gradient_bytes();
    const auto whole = [&](const ExpertArrays& arrays) {
      std::vector<std::byte> values(local_experts() * half);
      const int64_t part = static_cast<int64_t>(values.size() / arrays.size());
      for (std::size_t i = 0; i < arrays.size(); ++i) arrays[i].read(values.data() + i * part, part);
      return values;
    };
    join_halves(whole(own.dw1).data(), whole(own.dw1_up).data(), local_experts(), half, dw1_of(result, local));
  } else {
    read(own.dw1, halves() * local_experts() * expert_elements(), result.dw1_bf16, result.dw1_fp32);
  }
  read(own.dw2, local_experts() * expert_elements(), result.dw2_bf16, result.dw2_fp32);
  if (!config_.numerics.bias) return;
  read(own.db1, local_experts() * halves() * config_.shape.intermediate, result.db1_bf16, result.db1_fp32);
  read(own.db2, local_experts() * config_.shape.hidden, result.db2_bf16, result.db2_fp32);
}

LayerResult LayerRunner::local_result() const {
  LayerResult result = out_;
  const auto [first, count] = local_ranks();
  for (std::size_t local = 0; local < device_ranks_.size(); ++local) {
    const RankRange before{first, static_cast<int>(local)};
    device_ranks_[local].y.read(result.y.data() + data_.tokens_of(before) * config_.shape.hidden,
                                data_.tokens[first + local] * config_.shape.hidden * kElement);
    if (!device_ranks_[local].dw1.empty()) read_gradients(static_cast<int>(local), result);
  }
  const int64_t columns = halves() * config_.shape.intermediate;
  for (int64_t expert = first * local_experts(); expert < (first + count) * local_experts(); ++expert) {
    const int rank = static_cast<int>(expert / local_experts());
    const int64_t rows = placement_.expert_rows(expert);
    if (rows == 0) continue;
    const BFloat16* z = saved_.z(rank);
    if (z == nullptr) continue;  // save.z=recompute
    z += placement_.expert_segment(expert) * columns;
    const std::size_t end = result.z.size();
    result.z.resize(end + static_cast<std::size_t>(rows * columns));
    if (on_devices()) {
      cuda::DeviceArray::read_device(group_.device(rank), z, result.z.data() + end, rows * columns * kElement);
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
  gather(result.db1_bf16);
  gather(result.db2_bf16);
  gather(result.db1_fp32);
  gather(result.db2_fp32);
  return result;
}

}  // namespace uniep::cli
