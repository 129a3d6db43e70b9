#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "support/c_layer.h"

// Gate and up apart and dense routing through the C API.
namespace uniep::test {
namespace {

// A C layer whose arguments have gate and up apart and maps; on odd ranks by addresses.
class OtherForms {
 public:
  explicit OtherForms(CLayer& layer) : layer_(layer), forms_(static_cast<std::size_t>(layer.source.ranks)) {
    for (int rank = 0; rank < layer.source.ranks; ++rank) {
      give_map(rank);
      give_weights(rank);
    }
  }

  // Into the layer's result, from [T, E] and from gate and up apart.
  void gather() {
    const LayerShape& shape = layer_.source.config.shape;
    for (int rank = 0; rank < layer_.source.ranks; ++rank) {
      Form& form = forms_[rank];
      const int64_t first = layer_.source.data.first_token(rank) * shape.topk;
      for (int64_t slot = 0; slot < layer_.source.data.tokens[rank] * shape.topk; ++slot) {
        const int32_t expert = layer_.source.data.ids[first + slot];
        float& from = form.dprobs[slot / shape.topk * shape.experts + std::max(expert, 0)];
        layer_.result.dprobs[first + slot] = expert < 0 ? 0.0f : std::exchange(from, 0.0f);
      }
      // The bytes of +0.
      EXPECT_TRUE(std::all_of(form.dprobs.begin(), form.dprobs.end(),
                              [](float value) { return std::bit_cast<uint32_t>(value) == 0; }));
      for (std::size_t expert = 0; expert < form.halves.size() / 2; ++expert) {
        std::byte* const whole = static_cast<std::byte*>(form.whole[expert]);
        std::memcpy(whole, form.dw1.data() + expert * half_bytes(), half_bytes());
        std::memcpy(whole + half_bytes(), form.dw1.data() + (form.whole.size() + expert) * half_bytes(), half_bytes());
      }
    }
  }

 private:
  struct Form {
    std::vector<uint8_t> map;
    std::vector<float> probs, dprobs;
    std::vector<BFloat16> w1;               // all gates, then all ups
    std::vector<std::byte> dw1;             // the same
    std::vector<const void*> w1_addresses;  // the same
    std::vector<void*> halves;              // of dw1, the same
    std::vector<void*> whole;               // dw1 of each expert in the result
  };

  int64_t half_elements() const { return layer_.config.intermediate * layer_.config.hidden; }
  std::size_t half_bytes() const {
    const bool bf16 = layer_.config.weight_gradient == UNIEP_WEIGHT_GRADIENT_BF16;
    return static_cast<std::size_t>(half_elements()) * (bf16 ? sizeof(BFloat16) : sizeof(float));
  }

  void give_map(int rank) {
    const LayerShape& shape = layer_.source.config.shape;
    Form& form = forms_[rank];
    uniep_routing& routing = layer_.routings[rank];
    form.map.assign(routing.tokens * shape.experts + 1, 0);  // not null without tokens
    form.probs.assign(form.map.size(), -1e30f);
    form.dprobs.assign(routing.tokens * shape.experts, -1.0f);
    const int64_t first = layer_.source.data.first_token(rank) * shape.topk;
    for (int64_t slot = 0; slot < routing.tokens * shape.topk; ++slot) {
      const int32_t expert = layer_.source.data.ids[first + slot];
      if (expert < 0) continue;
      form.map[slot / shape.topk * shape.experts + expert] = static_cast<uint8_t>(1 + slot % 200);
      form.probs[slot / shape.topk * shape.experts + expert] = layer_.source.data.probs[first + slot];
    }
    routing.topk_ids = nullptr;
    routing.routing_map = form.map.data();
    routing.probs = form.probs.data();
    layer_.backward_arguments[rank].dprobs = form.dprobs.data();
  }

  void give_weights(int rank) {
    const LayerShape& shape = layer_.source.config.shape;
    const int64_t local = shape.experts / layer_.source.ranks;
    Form& form = forms_[rank];
    form.dw1.resize(static_cast<std::size_t>(2 * local) * half_bytes());
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t expert = 0; expert < local; ++expert) {
        const BFloat16* const from = layer_.source.data.w1_of(rank) + (2 * expert + half) * half_elements();
        form.w1.insert(form.w1.end(), from, from + half_elements());
        void* const whole = layer_.dw1_experts[rank * local + expert];
        std::byte* const to = form.dw1.data() + (half * local + expert) * half_bytes();
        std::memcpy(to, static_cast<const std::byte*>(whole) + half * half_bytes(), half_bytes());
        form.halves.push_back(to);
        if (half == 0) form.whole.push_back(whole);
      }
    }
    for (int64_t part = 0; part < 2 * local; ++part)
      form.w1_addresses.push_back(form.w1.data() + part * half_elements());
    uniep_weights& weights = layer_.weights[rank];
    uniep_weight_gradients& gradients = layer_.gradients[rank];
    if (rank % 2 == 1) {
      weights.w1_experts = form.w1_addresses.data();
      weights.w1_up_experts = form.w1_addresses.data() + local;
      gradients.dw1_experts = form.halves.data();
      gradients.dw1_up_experts = form.halves.data() + local;
    } else {
      weights.w1 = form.w1_addresses[0];
      weights.w1_up = form.w1_addresses[local];
      gradients.dw1 = form.halves[0];
      gradients.dw1_up = form.halves[local];
    }
  }

  CLayer& layer_;
  std::vector<Form> forms_;
};

TEST(CLayerForms, GiveTheBitsOfTheSequentialRun) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    RandomLayer random = random_layer(seed, {.most_local_experts = 6});
    random.data = with_ascending_slots(random.data);
    SCOPED_TRACE(random.description);
    CLayer layer(random);
    OtherForms forms(layer);
    const GroupHandle group = make_group(group_options(random.ranks));
    const PlacementHandle placement = layer.place(group.get());
    const SavedHandle saved = layer.forward(group.get(), placement.get(), "auto");
    ASSERT_NE(saved, nullptr);
    const bool later = seed % 2 == 0;
    for (uniep_backward_arguments& own : layer.backward_arguments) {
      own.weight_gradients = later ? UNIEP_WEIGHT_GRADIENTS_LATER : UNIEP_WEIGHT_GRADIENTS_NOW;
    }
    uniep_pending* made = nullptr;
    expect_ok(uniep_backward(group.get(), &layer.config, "auto", saved.get(), layer.backward_arguments.data(),
                             random.ranks, &made));
    const PendingHandle pending(made);
    const std::vector<uniep_weight_gradient_arguments> gradients = layer.gradient_arguments();
    if (later) expect_ok(uniep_make_weight_gradients(group.get(), pending.get(), gradients.data(), random.ranks));
    forms.gather();
    cli::LayerResult expected = run_sequential(random);
    expected.z.clear();
    ASSERT_EQ(difference(layer.result, expected), "");
  }
}

TEST(CLayerForms, MisuseIsNamed) {
  RandomLayer random = random_layer(3, {{2}, 4, 16, 32, {}, 8});
  random.data = with_ascending_slots(random.data);
  CLayer layer(random);
  const void* const ids = layer.routings[0].topk_ids;
  OtherForms forms(layer);
  const GroupHandle group = make_group(group_options(2));
  uniep_placement* placed = nullptr;
  const auto place = [&] {
    return uniep_place(group.get(), &layer.config, layer.routings.data(), 2, nullptr, &placed);
  };
  layer.routings[0].topk_ids = ids;
  expect_failure(UNIEP_INVALID_ARGUMENT, "routing_map: given beside topk_ids on rank 0", place());
  layer.routings[0].topk_ids = nullptr;
  expect_ok(place());
  const PlacementHandle placement(placed);
  layer.weights[0].w1_up_experts = layer.weights[1].w1_experts;
  uniep_saved* saved = nullptr;
  expect_failure(
      UNIEP_INVALID_ARGUMENT, "w1_up: addresses on rank 0, and w1 one tensor",
      uniep_forward(group.get(), &layer.config, "auto", placement.get(), layer.forward_arguments.data(), 2, &saved));
}

}  // namespace
}  // namespace uniep::test
