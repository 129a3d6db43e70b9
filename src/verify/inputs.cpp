#include "verify/inputs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "io/npy.h"
#include "io/safetensors_writer.h"
#include "verify/rank_memory.h"

namespace uniep::verify {
namespace {

template <typename Id>
void read_ids(const Group& group, const Routing& routing, int rank, int64_t topk, HostRouting& out) {
  const HostView<Id> ids(group, rank, static_cast<const Id*>(routing.topk_ids), routing.tokens * topk);
  const HostView<float> probs(group, rank, routing.probs, routing.tokens * topk);
  for (int64_t i = 0; i < routing.tokens * topk; ++i) {
    out.ids.push_back(static_cast<int32_t>(ids.data()[i]));
    out.probs.push_back(out.ids.back() < 0 ? 0.0f : probs.data()[i]);
  }
}

void read_map(const Group& group, const Routing& routing, int rank, const LayerShape& shape, HostRouting& out) {
  const int64_t entries = routing.tokens * shape.experts;
  const HostView<uint8_t> map(group, rank, routing.routing_map, entries);
  const HostView<float> probs(group, rank, routing.probs, entries);
  out.ids.assign(routing.tokens * shape.topk, -1);
  out.probs.assign(routing.tokens * shape.topk, 0.0f);
  for (int64_t token = 0; token < routing.tokens; ++token) {
    int64_t slot = token * shape.topk;
    for (int64_t expert = 0; expert < shape.experts; ++expert) {
      if (map.data()[token * shape.experts + expert] == 0) continue;
      out.ids[slot] = static_cast<int32_t>(expert);
      out.probs[slot++] = probs.data()[token * shape.experts + expert];
    }
  }
}

template <typename T>
std::span<const std::byte> bytes_of(const T* values, int64_t count) {
  return std::as_bytes(std::span(values, static_cast<std::size_t>(count)));
}

std::string replay_command(const Inputs& inputs, const std::string& path) {
  const LayerShape& shape = inputs.config.shape;
  std::vector<int64_t> tokens;
  for (const Routing& routing : inputs.routings) tokens.push_back(routing.tokens);
  std::string command = fmt::format(
      "uniep run --ranks {} --tokens {} --hidden {} --intermediate {} --experts {} --topk {} --routing {}.npy "
      "--tensors {}.safetensors",
      inputs.ranks(), fmt::join(tokens, ","), shape.hidden, shape.intermediate, shape.experts, shape.topk, path, path);
  if (inputs.config.numerics.combine_groups > 0) {
    command += fmt::format(" --combine-groups {}", inputs.config.numerics.combine_groups);
  }
  const Numerics& numerics = inputs.config.numerics;
  if (activation_text(numerics) != activation_text({})) {
    command += fmt::format(" --activation {}", activation_text(numerics));
  }
  if (numerics.router_weight != RouterWeight::kActivation) {
    command += fmt::format(" --router-weight {}", router_weight_text(numerics.router_weight));
  }
  return inputs.direction == Direction::kBackward ? command + " --backward" : command;
}

}  // namespace

void Inputs::add_experts(const Weights& own) {
  const int64_t half = config.shape.intermediate * config.shape.hidden;
  const bool apart = own.w1_up != nullptr || own.w1_up_experts != nullptr;
  for (int64_t local = 0; local < local_experts(); ++local) {
    ExpertWeights found;
    found.gate = own.w1_experts != nullptr ? own.w1_experts[local] : own.w1 + local * half * (apart ? 1 : 2);
    found.up = found.gate + half;
    if (apart) found.up = own.w1_up_experts != nullptr ? own.w1_up_experts[local] : own.w1_up + local * half;
    found.w2 = own.w2_experts != nullptr ? own.w2_experts[local] : own.w2 + local * half;
    experts.push_back(found);
  }
}

std::vector<HostRouting> read_routings(const Group& group, const Inputs& inputs) {
  const LayerShape& shape = inputs.config.shape;
  std::vector<HostRouting> read(inputs.ranks());
  for (int rank = 0; rank < inputs.ranks(); ++rank) {
    const Routing& routing = inputs.routings[rank];
    if (routing.tokens == 0) continue;
    if (routing.topk_ids == nullptr) {
      read_map(group, routing, rank, shape, read[rank]);
    } else if (routing.index_type == IndexType::kInt64) {
      read_ids<int64_t>(group, routing, rank, shape.topk, read[rank]);
    } else {
      read_ids<int32_t>(group, routing, rank, shape.topk, read[rank]);
    }
  }
  return read;
}

Sums sum_inputs(const Group& group, const Inputs& inputs) {
  const LayerShape& shape = inputs.config.shape;
  Sums sums;
  for (const Tensor tensor : {Tensor::kX, Tensor::kDy, Tensor::kIds, Tensor::kProbs}) {
    sums.of(tensor).resize(inputs.ranks());
  }
  const std::vector<HostRouting> routings = read_routings(group, inputs);
  for (int rank = 0; rank < inputs.ranks(); ++rank) {
    const int64_t tokens = inputs.routings[rank].tokens;
    const HostView<BFloat16> x(group, rank, inputs.x[rank], tokens * shape.hidden);
    sums.of(Tensor::kX)[rank].append(x.data(), tokens, shape.hidden, shape.hidden);
    if (inputs.direction == Direction::kBackward) {
      const HostView<BFloat16> dy(group, rank, inputs.dy[rank], tokens * shape.hidden);
      sums.of(Tensor::kDy)[rank].append(dy.data(), tokens, shape.hidden, shape.hidden);
    }
    const std::vector<float> ids(routings[rank].ids.begin(), routings[rank].ids.end());
    sums.of(Tensor::kIds)[rank].append(ids.data(), tokens, shape.topk, shape.topk);
    sums.of(Tensor::kProbs)[rank].append(routings[rank].probs.data(), tokens, shape.topk, shape.topk);
  }
  const int64_t half = shape.intermediate * shape.hidden;
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    const int rank = static_cast<int>(expert / inputs.local_experts());
    const ExpertWeights own = inputs.expert(expert);
    TileSums &w1 = sums.of(Tensor::kW1).emplace_back(), &w2 = sums.of(Tensor::kW2).emplace_back();
    for (const BFloat16* part : {own.gate, own.up}) {
      const HostView<BFloat16> view(group, rank, part, half);
      w1.append(view.data(), shape.intermediate, shape.hidden, shape.hidden);
    }
    const HostView<BFloat16> view(group, rank, own.w2, half);
    w2.append(view.data(), shape.hidden, shape.intermediate, shape.intermediate);
  }
  return sums;
}

std::string write_inputs(const Group& group, const Inputs& inputs, const std::string& path) {
  const LayerShape& shape = inputs.config.shape;
  const bool backward = inputs.direction == Direction::kBackward;
  const std::vector<HostRouting> routings = read_routings(group, inputs);
  int64_t tokens = 0;
  io::NpyArray ids;
  std::vector<int32_t>& all_ids = ids.values.emplace<std::vector<int32_t>>();
  std::vector<float> probs;
  for (int rank = 0; rank < inputs.ranks(); ++rank) {
    tokens += inputs.routings[rank].tokens;
    all_ids.insert(all_ids.end(), routings[rank].ids.begin(), routings[rank].ids.end());
    probs.insert(probs.end(), routings[rank].probs.begin(), routings[rank].probs.end());
  }
  ids.shape = {tokens, shape.topk};
  io::write_npy(path + ".npy", ids);

  std::vector<io::TensorSpec> specs = {{"x", "BF16", {tokens, shape.hidden}}};
  if (backward) specs.push_back({"dy", "BF16", {tokens, shape.hidden}});
  specs.push_back({"w1", "BF16", {shape.experts, 2 * shape.intermediate, shape.hidden}});
  specs.push_back({"w2", "BF16", {shape.experts, shape.hidden, shape.intermediate}});
  specs.push_back({"probs", "F32", {tokens, shape.topk}});
  io::SafetensorsWriter file(path + ".safetensors", specs, {{"replay", replay_command(inputs, path)}});
  const auto append = [&](int rank, const BFloat16* values, int64_t count) {
    file.append(bytes_of(HostView<BFloat16>(group, rank, values, count).data(), count));
  };
  for (const std::vector<const BFloat16*>* rows : {&inputs.x, &inputs.dy}) {
    if (rows == &inputs.dy && !backward) continue;
    for (int rank = 0; rank < inputs.ranks(); ++rank) {
      append(rank, (*rows)[rank], inputs.routings[rank].tokens * shape.hidden);
    }
  }
  const int64_t half = shape.intermediate * shape.hidden;
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    const ExpertWeights own = inputs.expert(expert);
    append(static_cast<int>(expert / inputs.local_experts()), own.gate, half);
    append(static_cast<int>(expert / inputs.local_experts()), own.up, half);
  }
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    append(static_cast<int>(expert / inputs.local_experts()), inputs.expert(expert).w2, half);
  }
  file.append(bytes_of(probs.data(), static_cast<int64_t>(probs.size())));
  file.commit();
  return path + ".safetensors";
}

}  // namespace uniep::verify
