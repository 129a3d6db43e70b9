#include "support/c_layer.h"

#include <gtest/gtest.h>

namespace uniep::test {

void expect_failure(uniep_status status, const std::string& text, uniep_status got) {
  const std::string message = uniep_last_error();
  EXPECT_EQ(got, status) << message;
  EXPECT_NE(message.find(text), std::string::npos) << "message: " << message << "\nexpected in it: " << text;
}
void expect_ok(uniep_status got) {
  ASSERT_EQ(got, UNIEP_OK) << uniep_last_error();
}

uniep_group_options group_options(int ranks, int workers) {
  uniep_group_options options{};
  options.size = sizeof(options);
  options.engine = UNIEP_ENGINE_CPU;
  options.ranks = ranks;
  options.workers = workers;
  return options;
}

GroupHandle make_group(const uniep_group_options& options) {
  uniep_group* group = nullptr;
  EXPECT_EQ(uniep_group_create(&options, &group), UNIEP_OK) << uniep_last_error();
  return GroupHandle(group);
}

// Odd ranks give int64 ids and an address for each expert, even ones int32 ids and one tensor.
CLayer::CLayer(const RandomLayer& layer) : source(layer) {
  const LayerShape& shape = layer.config.shape;
  const cli::LayerData& data = layer.data;
  const Numerics& numerics = layer.config.numerics;
  config.size = sizeof(config);
  config.hidden = shape.hidden;
  config.intermediate = shape.intermediate;
  config.experts = shape.experts;
  config.topk = shape.topk;
  config.weight_gradient = static_cast<int32_t>(numerics.weight_gradient);
  config.combine_groups = numerics.combine_groups;

  result.y.assign(data.x.size(), BFloat16{0xffff});
  result.dx = result.y;
  result.dprobs.assign(data.ids.size(), -1.0f);
  const bool bf16 = numerics.weight_gradient == WeightGradient::kBFloat16;
  for (std::size_t i = 0; i < data.w1.size(); ++i) {
    bf16 ? result.dw1_bf16.push_back({0xffff}) : result.dw1_fp32.push_back(cli::start_main_grad(i));
  }
  for (std::size_t i = 0; i < data.w2.size(); ++i) {
    bf16 ? result.dw2_bf16.push_back({0xffff}) : result.dw2_fp32.push_back(cli::start_main_grad(i));
  }
  ids64.assign(data.ids.begin(), data.ids.end());

  const int64_t w2_elements = shape.hidden * shape.intermediate;
  const int64_t element = bf16 ? sizeof(BFloat16) : sizeof(float);
  std::byte* dw1 = bf16 ? reinterpret_cast<std::byte*>(result.dw1_bf16.data())
                        : reinterpret_cast<std::byte*>(result.dw1_fp32.data());
  std::byte* dw2 = bf16 ? reinterpret_cast<std::byte*>(result.dw2_bf16.data())
                        : reinterpret_cast<std::byte*>(result.dw2_fp32.data());
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    w1_experts.push_back(data.w1.data() + 2 * expert * w2_elements);
    w2_experts.push_back(data.w2.data() + expert * w2_elements);
    dw1_experts.push_back(dw1 + 2 * expert * w2_elements * element);
    dw2_experts.push_back(dw2 + expert * w2_elements * element);
  }

  weights.resize(static_cast<std::size_t>(layer.ranks));
  gradients.resize(weights.size());
  for (int rank = 0; rank < layer.ranks; ++rank) {
    const int64_t token = data.first_token(rank), slot = token * shape.topk;
    const int64_t expert = rank * shape.experts / layer.ranks;
    const bool odd = rank % 2 == 1;
    uniep_routing& routing = routings.emplace_back();
    routing.size = sizeof(routing);
    routing.tokens = data.tokens[rank];
    routing.topk_ids = odd ? static_cast<const void*>(ids64.data() + slot) : data.ids.data() + slot;
    routing.index_type = odd ? UNIEP_INDEX_INT64 : UNIEP_INDEX_INT32;
    routing.probs = data.probs.data() + slot;

    uniep_weights& own = weights[rank];
    own.size = sizeof(own);
    uniep_weight_gradients& made = gradients[rank];
    made.size = sizeof(made);
    uniep_forward_arguments& forward = forward_arguments.emplace_back();
    forward.size = sizeof(forward);
    forward.weights = &own;
    forward.x = data.x.data() + token * shape.hidden;
    forward.y = result.y.data() + token * shape.hidden;
    uniep_backward_arguments& backward = backward_arguments.emplace_back();
    backward.size = sizeof(backward);
    backward.weights = &own;
    backward.gradients = &made;
    backward.dy = data.dy.data() + token * shape.hidden;
    backward.x = forward.x;
    backward.dx = result.dx.data() + token * shape.hidden;
    backward.dprobs = result.dprobs.data() + slot;
    if (odd) {
      own.w1_experts = w1_experts.data() + expert;
      own.w2_experts = w2_experts.data() + expert;
      made.dw1_experts = dw1_experts.data() + expert;
      made.dw2_experts = dw2_experts.data() + expert;
    } else {
      own.w1 = w1_experts[expert];
      own.w2 = w2_experts[expert];
      made.dw1 = dw1_experts[expert];
      made.dw2 = dw2_experts[expert];
    }
  }
}

PlacementHandle CLayer::place(uniep_group* group) const {
  uniep_placement* placement = nullptr;
  EXPECT_EQ(uniep_place(group, &config, routings.data(), source.ranks, nullptr, &placement), UNIEP_OK)
      << uniep_last_error();
  return PlacementHandle(placement);
}

SavedHandle CLayer::forward(uniep_group* group, const uniep_placement* placement, const char* schedule) const {
  uniep_saved* saved = nullptr;
  EXPECT_EQ(uniep_forward(group, &config, schedule, placement, forward_arguments.data(), source.ranks, &saved),
            UNIEP_OK)
      << uniep_last_error();
  return SavedHandle(saved);
}

uniep_status CLayer::backward(uniep_group* group, const uniep_saved* saved, const char* schedule) const {
  return uniep_backward(group, &config, schedule, saved, backward_arguments.data(), source.ranks, nullptr);
}

std::vector<uniep_weight_gradient_arguments> CLayer::gradient_arguments() const {
  std::vector<uniep_weight_gradient_arguments> arguments;
  for (const uniep_weight_gradients& own : gradients) arguments.push_back({sizeof(arguments[0]), &own, nullptr, 0});
  return arguments;
}

}  // namespace uniep::test
