#include "support/random_layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <tuple>

#include "model/elementwise.h"

namespace uniep::test {
namespace {

enum class RoutingKind { kUniform, kZipf, kHotExpert, kFewExperts };
const char* const kRoutingNames[] = {"uniform", "zipf", "hot expert", "few experts"};

std::vector<BFloat16> random_values(Random& random, int64_t count, float scale) {
  std::vector<BFloat16> values(count);
  for (BFloat16& value : values) value = to_bfloat16(static_cast<float>(random.unit() * 2 - 1) * scale);
  return values;
}

// One token's experts, without repetition, some slots unused.
void route_token(Random& random, const LayerShape& shape, RoutingKind kind, double exponent, bool unused_slots,
                 int32_t* ids) {
  const int64_t reach =
      kind == RoutingKind::kFewExperts ? std::max<int64_t>(shape.topk, shape.experts / 3) : shape.experts;
  std::vector<double> weights(reach);
  for (int64_t e = 0; e < reach; ++e) weights[e] = kind == RoutingKind::kZipf ? std::pow(e + 1.0, -exponent) : 1.0;
  for (int64_t slot = 0; slot < shape.topk; ++slot) {
    const double target = random.unit() * std::accumulate(weights.begin(), weights.end(), 0.0);
    double sum = 0;
    int64_t chosen = -1;
    for (int64_t e = 0; e < reach; ++e) {
      if (weights[e] == 0) continue;
      chosen = e;
      sum += weights[e];
      if (sum > target) break;
    }
    if (kind == RoutingKind::kHotExpert && slot == 0) chosen = shape.experts / 2;
    weights[chosen] = 0;
    ids[slot] = unused_slots && random.one_in(4) ? -1 : static_cast<int32_t>(chosen);
  }
}

template <typename T>
std::string difference_of(const char* name, const std::vector<T>& got, const std::vector<T>& expected) {
  if (got.size() != expected.size()) return fmt::format("{}: {} elements, not {}", name, got.size(), expected.size());
  std::size_t differ = 0, first = 0;
  for (std::size_t i = got.size(); i-- > 0;) {
    if (std::memcmp(&got[i], &expected[i], sizeof(T)) == 0) continue;
    ++differ;
    first = i;
  }
  if (differ == 0) return "";
  uint32_t got_bits = 0, expected_bits = 0;
  std::memcpy(&got_bits, &got[first], sizeof(T));
  std::memcpy(&expected_bits, &expected[first], sizeof(T));
  return fmt::format("{}: {} of {} elements differ, the first is element {}: {:x}, not {:x}", name, differ, got.size(),
                     first, got_bits, expected_bits);
}

void draw_activation(Random& random, Numerics& numerics) {
  const char* const kTexts[] = {"swiglu",
                                "swiglu:alpha=1.702,limit=1,up_offset=1",
                                "swiglu:gate_limit=0.5",
                                "swiglu:up_limit=0.75,up_offset=-0.25",
                                "geglu_tanh",
                                "geglu_erf",
                                "relu2",
                                "silu"};
  set_activation(numerics, kTexts[random.next() % std::size(kTexts)]);
  numerics.router_weight = static_cast<RouterWeight>(random.between(0, 2));
  numerics.bias = numerics.router_weight != RouterWeight::kInput && random.one_in(2);
}

void fill_biases(Random& random, cli::LayerData& data) {
  data.b1 = random_values(random, data.shape.experts * data.halves * data.shape.intermediate, 1.0f);
  data.b2 = random_values(random, data.shape.experts * data.shape.hidden, 1.0f);
}

}  // namespace

uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t value = state_;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

void draw_biases(RandomLayer& layer) {
  Random random(1);
  fill_biases(random, layer.data);
}

void agree_on_saves(PartialSchedule& backward, const Schedule& forward, Random& random, bool any) {
  const auto again = [&](bool kept) { return !kept || (any && random.one_in(4)); };
  backward.set("save.xg", again(forward.save_xg == SaveXg::kKeep) ? "redispatch" : "keep");
  backward.set("save.z", again(forward.save_z == SaveZ::kKeep) ? "recompute" : "keep");
}

RandomLayer random_layer(uint64_t seed, const RandomLayerLimits& limits) {
  Random random(seed);
  RandomLayer layer;
  layer.ranks = limits.ranks[random.next() % limits.ranks.size()];
  const int64_t local_experts = random.one_in(4) ? 1 : random.between(1, limits.most_local_experts);
  LayerShape& shape = layer.config.shape;
  shape.experts = local_experts * layer.ranks;
  shape.topk = random.between(1, std::min<int64_t>(8, shape.experts));
  shape.hidden = 8 * random.between(1, limits.most_columns / 8);
  shape.intermediate = 8 * random.between(1, limits.most_columns / 8);
  if (!limits.columns.empty()) {
    std::tie(shape.hidden, shape.intermediate) = limits.columns[random.next() % limits.columns.size()];
  }
  layer.config.numerics.weight_gradient = static_cast<WeightGradient>(random.between(0, 2));
  if (random.one_in(3)) {
    std::vector<int64_t> legal;
    for (int64_t groups = layer.ranks; groups <= shape.experts; groups += layer.ranks) {
      if (shape.experts % groups == 0) legal.push_back(groups);
    }
    layer.config.numerics.combine_groups = legal[random.next() % legal.size()];
  }
  if (limits.any_activation) draw_activation(random, layer.config.numerics);
  if (!limits.activations.empty()) {
    const std::size_t count = limits.activations.size();
    set_activation(layer.config.numerics, limits.activations[seed % count]);
    const std::size_t form = seed / count % kFormsOfActivation;
    layer.config.numerics.bias = form == 1 || form == 2;
    if (form == 2 || form == 3) layer.config.numerics.router_weight = RouterWeight::kOutput;
    if (form == 4) layer.config.numerics.router_weight = RouterWeight::kInput;
  }

  cli::LayerData& data = layer.data;
  data.shape = shape;
  for (int rank = 0; rank < layer.ranks; ++rank) {
    const bool is_empty = random.one_in(5) && limits.fewest_tokens == 0;
    data.tokens.push_back(is_empty ? 0
                                   : random.between(std::max<int64_t>(1, limits.fewest_tokens), limits.most_tokens));
  }
  const int64_t tokens = data.all_tokens();
  const RoutingKind kind = static_cast<RoutingKind>(random.between(0, 3));
  const double exponent = random.unit() * 2;
  const bool unused_slots = random.one_in(3);
  data.ids.resize(tokens * shape.topk);
  for (int64_t token = 0; token < tokens; ++token) {
    route_token(random, shape, kind, exponent, unused_slots, data.ids.data() + token * shape.topk);
  }
  for (std::size_t i = 0; i < data.ids.size(); ++i) data.probs.push_back(static_cast<float>(random.unit()));
  data.x = random_values(random, tokens * shape.hidden, 2.0f);
  data.dy = random_values(random, tokens * shape.hidden, 2.0f);
  // Weights of variance 1 / fan-in keep z and o of order one.
  data.halves = is_gated(layer.config.numerics.activation) ? 2 : 1;
  data.w1 = random_values(random, shape.experts * data.halves * shape.intermediate * shape.hidden,
                          std::sqrt(3.0f / static_cast<float>(shape.hidden)));
  data.w2 = random_values(random, shape.experts * shape.hidden * shape.intermediate,
                          std::sqrt(3.0f / static_cast<float>(shape.intermediate)));
  if (layer.config.numerics.bias) fill_biases(random, layer.data);
  layer.description = fmt::format(
      "seed {}: R {} E {} K {} H {} I {} T {} {} groups {} wgrad {} {} weight on {}{}{}", seed, layer.ranks,
      shape.experts, shape.topk, shape.hidden, shape.intermediate, tokens, kRoutingNames[static_cast<int>(kind)],
      layer.config.numerics.combine_groups, static_cast<int>(layer.config.numerics.weight_gradient),
      activation_text(layer.config.numerics), router_weight_text(layer.config.numerics.router_weight),
      layer.config.numerics.bias ? " biases" : "", unused_slots ? " unused slots" : "");
  return layer;
}

cli::LayerData with_ascending_slots(const cli::LayerData& data) {
  cli::LayerData ascending = data;
  const auto topk = static_cast<std::size_t>(data.shape.topk);
  std::vector<std::pair<uint32_t, float>> slots(topk);  // -1 is the largest as an unsigned number
  for (std::size_t first = 0; first < data.ids.size(); first += topk) {
    for (std::size_t k = 0; k < topk; ++k)
      slots[k] = {static_cast<uint32_t>(data.ids[first + k]), data.probs[first + k]};
    std::sort(slots.begin(), slots.end());
    for (std::size_t k = 0; k < topk; ++k) {
      ascending.ids[first + k] = static_cast<int32_t>(slots[k].first);
      ascending.probs[first + k] = slots[k].second;
    }
  }
  return ascending;
}

cli::LayerData on_one_rank(const cli::LayerData& data) {
  cli::LayerData one = data;
  one.tokens = {data.all_tokens()};
  return one;
}

cli::LayerResult run_layer(Group& group, const LayerConfig& config, const cli::LayerData& data, const Schedule& forward,
                           const Schedule& backward) {
  cli::LayerRunner runner(group, config, data);
  runner.forward(forward);
  runner.backward(backward);
  return runner.result();
}

cli::LayerResult run_sequential(const RandomLayer& layer) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.workers = 1;
  Group group(options);
  const PartialSchedule none = PartialSchedule::parse("fusion=none");
  const LayerConfig& config = layer.config;
  return run_layer(group, config, on_one_rank(layer.data),
                   resolve(none, {.direction = Direction::kForward,
                                  .shape = config.shape,
                                  .numerics = config.numerics,
                                  .machine = group.machine()}),
                   resolve(none, {.direction = Direction::kBackward,
                                  .shape = config.shape,
                                  .numerics = config.numerics,
                                  .machine = group.machine()}));
}

std::string difference(const cli::LayerResult& got, const cli::LayerResult& expected) {
  std::string text = difference_of("y", got.y, expected.y);
  if (text.empty() && got.has_z && expected.has_z) text = difference_of("z", got.z, expected.z);
  if (text.empty()) text = difference_of("dx", got.dx, expected.dx);
  if (text.empty()) text = difference_of("dprobs", got.dprobs, expected.dprobs);
  if (text.empty()) text = difference_of("dw1", got.dw1_bf16, expected.dw1_bf16);
  if (text.empty()) text = difference_of("dw2", got.dw2_bf16, expected.dw2_bf16);
  if (text.empty()) text = difference_of("dw1", got.dw1_fp32, expected.dw1_fp32);
  if (text.empty()) text = difference_of("dw2", got.dw2_fp32, expected.dw2_fp32);
  if (text.empty()) text = difference_of("db1", got.db1_bf16, expected.db1_bf16);
  if (text.empty()) text = difference_of("db2", got.db2_bf16, expected.db2_bf16);
  if (text.empty()) text = difference_of("db1", got.db1_fp32, expected.db1_fp32);
  if (text.empty()) text = difference_of("db2", got.db2_fp32, expected.db2_fp32);
  return text;
}

}  // namespace uniep::test
