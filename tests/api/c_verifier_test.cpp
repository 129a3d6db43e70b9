#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "support/c_layer.h"
#include "uniep/c_api.h"

// The verifier through the C API: what it finds is the C++ API's (verifier_test).
namespace uniep::test {
namespace {

using VerifierHandle = std::unique_ptr<uniep_verifier, Destroyer<uniep_verifier_destroy>>;

VerifierHandle make_verifier(uniep_group* group, int64_t every = 1) {
  uniep_verifier_options options{};
  options.size = sizeof(options);
  options.every = every;
  options.budget = 1;
  uniep_verifier* verifier = nullptr;
  expect_ok(uniep_verifier_create(group, &options, &verifier));
  return VerifierHandle(verifier);
}

TEST(CVerifier, ChecksBothDirectionsAndNamesAWeightThatChanged) {
  RandomLayer random = random_layer(3, {.ranks = {2}, .most_local_experts = 3, .fewest_tokens = 4});
  CLayer layer(random);
  const GroupHandle group = make_group(group_options(random.ranks));
  const VerifierHandle verifier = make_verifier(group.get());
  for (int step = 0; step < 3; ++step) {
    const PlacementHandle placement = layer.place(group.get());
    const SavedHandle saved = layer.forward(group.get(), placement.get(), "auto");
    expect_ok(uniep_verifier_after_forward(verifier.get(), "first", &layer.config, "auto", layer.routings.data(),
                                           layer.forward_arguments.data(), random.ranks, saved.get()));
    expect_ok(uniep_verifier_before_backward(verifier.get(), "first", &layer.config, layer.backward_arguments.data(),
                                             random.ranks));
    for (int rank = 0; rank < random.ranks; ++rank) {
      layer.backward_arguments[rank].x = layer.forward_arguments[rank].x;
    }
    expect_ok(layer.backward(group.get(), saved.get(), "auto"));
    expect_ok(uniep_verifier_after_backward(verifier.get(), "first", &layer.config, "auto", layer.routings.data(),
                                            layer.backward_arguments.data(), random.ranks));
    if (step == 2) random.data.w1[0].bits ^= 1u;
    int32_t findings = -1;
    expect_ok(uniep_verifier_end_step(verifier.get(), &findings));
    EXPECT_EQ(findings, step == 2 ? 1 : 0);
  }
  uniep_finding finding{};
  finding.size = sizeof(finding);
  expect_ok(uniep_verifier_finding(verifier.get(), 0, &finding));
  EXPECT_EQ(finding.size, sizeof(finding));
  EXPECT_EQ(finding.kind, UNIEP_FINDING_CHANGED_MEMORY);
  EXPECT_EQ(finding.rank, 0);
  EXPECT_EQ(finding.expert, 0);
  EXPECT_EQ(std::string(finding.layer), "first");
  EXPECT_EQ(std::string(finding.tensor), "w1");
  EXPECT_NE(std::string(finding.message).find("rank 0"), std::string::npos) << finding.message;
  expect_failure(UNIEP_INVALID_ARGUMENT, "index: 1", uniep_verifier_finding(verifier.get(), 1, &finding));
}

TEST(CVerifier, NamesWhatIsNull) {
  RandomLayer random = random_layer(3, {.ranks = {2}, .most_local_experts = 3, .fewest_tokens = 4});
  random.config.numerics.weight_gradient = WeightGradient::kMainGrad;
  CLayer layer(random);
  const GroupHandle group = make_group(group_options(random.ranks));
  const VerifierHandle verifier = make_verifier(group.get());
  const PlacementHandle placement = layer.place(group.get());
  const SavedHandle saved = layer.forward(group.get(), placement.get(), "auto");
  const auto after_forward = [&] {
    return uniep_verifier_after_forward(verifier.get(), "first", &layer.config, "auto", layer.routings.data(),
                                        layer.forward_arguments.data(), random.ranks, saved.get());
  };
  const auto without = [](auto& field, const char* text, const auto& call) {
    const auto kept = std::exchange(field, nullptr);
    expect_failure(UNIEP_INVALID_ARGUMENT, text, call());
    field = kept;
  };
  uniep_forward_arguments& forward = layer.forward_arguments[1];
  without(forward.x, "x: null on rank 1", after_forward);
  without(forward.y, "y: null on rank 1", after_forward);
  without(layer.routings[1].topk_ids, "topk_ids: null on rank 1", after_forward);
  without(layer.routings[1].probs, "probs: null on rank 1", after_forward);
  uniep_weights weights = *layer.forward_arguments[0].weights;
  layer.forward_arguments[0].weights = &weights;
  without(weights.w1, "w1: null on rank 0", after_forward);
  without(weights.w2, "w2: null on rank 0", after_forward);
  int32_t findings = -1;
  for (int step = 0; step < 2; ++step) {  // backward's turn comes
    expect_ok(after_forward());
    expect_ok(uniep_verifier_end_step(verifier.get(), &findings));
    EXPECT_EQ(findings, 0);
    if (step == 0) continue;
    for (int rank = 0; rank < random.ranks; ++rank) {
      layer.backward_arguments[rank].x = layer.forward_arguments[rank].x;
    }
  }
  const auto before_backward = [&] {
    return uniep_verifier_before_backward(verifier.get(), "first", &layer.config, layer.backward_arguments.data(),
                                          random.ranks);
  };
  const auto after_backward = [&] {
    return uniep_verifier_after_backward(verifier.get(), "first", &layer.config, "auto", layer.routings.data(),
                                         layer.backward_arguments.data(), random.ranks);
  };
  uniep_backward_arguments& backward = layer.backward_arguments[1];
  uniep_weight_gradients gradients = *layer.backward_arguments[0].gradients;
  layer.backward_arguments[0].gradients = &gradients;
  without(gradients.dw1, "dw1: null on rank 0", before_backward);
  without(gradients.dw2, "dw2: null on rank 0", before_backward);
  without(backward.dy, "dy: null on rank 1", after_backward);
  without(backward.dx, "dx: null on rank 1", after_backward);
  without(backward.dprobs, "dprobs: null on rank 1", after_backward);
  without(backward.x, "x (of a call that is verified): null on rank 1", after_backward);
}

TEST(CVerifier, RefusesWhatIsWrong) {
  const GroupHandle group = make_group(group_options(1));
  uniep_verifier* verifier = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null", uniep_verifier_create(nullptr, nullptr, &verifier));
  EXPECT_EQ(verifier, nullptr);
  uniep_verifier_options options{};
  options.size = sizeof(options);
  options.every = -1;
  expect_failure(UNIEP_INVALID_ARGUMENT, "every: -1", uniep_verifier_create(group.get(), &options, &verifier));
  options.every = 0;
  options.layer_count = -1;
  expect_failure(UNIEP_INVALID_ARGUMENT, "options.layer_count: -1",
                 uniep_verifier_create(group.get(), &options, &verifier));
  options.layer_count = 0;
  const VerifierHandle made = make_verifier(group.get());
  expect_failure(UNIEP_INVALID_ARGUMENT, "findings: null", uniep_verifier_end_step(made.get(), nullptr));
  uniep_verifier_destroy(nullptr);
}

}  // namespace
}  // namespace uniep::test
