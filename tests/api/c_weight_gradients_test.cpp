#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "support/c_layer.h"

// Weight gradients that come later or never, and the last use of a Saved, through the C API.
namespace uniep::test {
namespace {

class CWeightGradients : public testing::Test {
 protected:
  CWeightGradients()
      : random(random_layer(21, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8})),
        layer(random),
        expected(run_sequential(random)),
        group(make_group(group_options(2))),
        placement(layer.place(group.get())),
        saved(layer.forward(group.get(), placement.get(), kSchedule)) {
    expected.z.clear();
    gradients = layer.gradient_arguments();
  }

  std::vector<uniep_backward_arguments> arguments(int32_t time, int32_t last_use) const {
    std::vector<uniep_backward_arguments> arguments = layer.backward_arguments;
    for (uniep_backward_arguments& own : arguments) {
      own.weight_gradients = time;
      own.last_use = last_use;
      if (time != UNIEP_WEIGHT_GRADIENTS_NOW) own.gradients = nullptr;
    }
    return arguments;
  }
  uniep_status backward(const std::vector<uniep_backward_arguments>& given, PendingHandle& pending) {
    uniep_pending* made = nullptr;
    const uniep_status status = uniep_backward(group.get(), &layer.config, kSchedule, saved.get(), given.data(),
                                               static_cast<int32_t>(given.size()), &made);
    pending.reset(made);
    return status;
  }
  uniep_status make_gradients(const PendingHandle& pending) {
    return uniep_make_weight_gradients(group.get(), pending.get(), gradients.data(), 2);
  }

  static constexpr const char* kSchedule = "save.xg=keep";
  RandomLayer random;
  CLayer layer;
  cli::LayerResult expected;
  GroupHandle group;
  PlacementHandle placement;
  SavedHandle saved;
  std::vector<uniep_weight_gradient_arguments> gradients;
};

TEST_F(CWeightGradients, LaterGivesTheSameBitsInAnyOrderOfHandles) {
  PendingHandle first, second;
  expect_ok(backward(arguments(UNIEP_WEIGHT_GRADIENTS_LATER, 0), first));
  expect_ok(backward(arguments(UNIEP_WEIGHT_GRADIENTS_LATER, 1), second));
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  PendingHandle none;
  expect_failure(UNIEP_INVALID_ARGUMENT, "saved: used up", backward(arguments(UNIEP_WEIGHT_GRADIENTS_NONE, 0), none));
  saved.reset();
  placement.reset();
  gradients[0].sms = 1;
  expect_ok(make_gradients(second));
  EXPECT_EQ(difference(layer.result, expected), "");
  expect_failure(UNIEP_INVALID_ARGUMENT, "work: its dw1 has been made", make_gradients(second));
  group.reset();  // the rest is for a handle that outlives the group's
}

TEST_F(CWeightGradients, NowAndNoneLeaveNoWork) {
  PendingHandle pending;
  const CLayer untouched(random);
  expect_ok(backward(arguments(UNIEP_WEIGHT_GRADIENTS_NONE, 0), pending));
  EXPECT_EQ(pending, nullptr);
  cli::LayerResult frozen = expected;
  frozen.dw1_bf16 = untouched.result.dw1_bf16;
  frozen.dw2_bf16 = untouched.result.dw2_bf16;
  frozen.dw1_fp32 = untouched.result.dw1_fp32;
  frozen.dw2_fp32 = untouched.result.dw2_fp32;
  EXPECT_EQ(difference(layer.result, frozen), "");
  expect_ok(backward(arguments(UNIEP_WEIGHT_GRADIENTS_NOW, 0), pending));
  EXPECT_EQ(pending, nullptr);
  EXPECT_EQ(difference(layer.result, expected), "");
}

TEST_F(CWeightGradients, MemoryIsThatOfTheCppCall) {
  GroupOptions options;
  options.ranks = options.workers = 2;
  Group cpp(options);
  const cli::LayerRunner runner(cpp, random.config, random.data);
  const Schedule schedule = resolve(PartialSchedule::parse(kSchedule), {.direction = Direction::kBackward,
                                                                        .shape = random.config.shape,
                                                                        .numerics = random.config.numerics,
                                                                        .machine = cpp.machine()});
  for (int32_t time = UNIEP_WEIGHT_GRADIENTS_NOW; time <= UNIEP_WEIGHT_GRADIENTS_NONE; ++time) {
    for (int32_t last_use = 0; last_use <= 1; ++last_use) {
      uniep_memory_need needs[2] = {};
      needs[0].size = needs[1].size = sizeof(needs[0]);
      expect_ok(uniep_query_backward_memory(group.get(), &layer.config, kSchedule, placement.get(), time, last_use,
                                            needs, 2));
      const std::vector<MemoryNeed> same = memory_need(cpp, random.config, schedule, runner.placement(),
                                                       {.weight_gradients = static_cast<WeightGradientTime>(time),
                                                        .last_use = last_use == 1,
                                                        .direction = Direction::kBackward});
      for (int rank = 0; rank < 2; ++rank) {
        EXPECT_EQ(needs[rank].saved_bytes, same[rank].saved_bytes);
        EXPECT_EQ(needs[rank].workspace_bytes, same[rank].workspace_bytes);
        EXPECT_EQ(needs[rank].pending_bytes, same[rank].pending_bytes);
        EXPECT_EQ(needs[rank].pending_bytes > 0, time == UNIEP_WEIGHT_GRADIENTS_LATER);
      }
    }
  }
}

TEST_F(CWeightGradients, MisuseIsNamed) {
  PendingHandle pending;
  const auto refused = [](const char* text, uniep_status status) {
    expect_failure(UNIEP_INVALID_ARGUMENT, text, status);
  };
  auto given = arguments(UNIEP_WEIGHT_GRADIENTS_LATER, 0);
  refused("pending: null pointer",
          uniep_backward(group.get(), &layer.config, kSchedule, saved.get(), given.data(), 2, nullptr));
  given[1].weight_gradients = 3;
  refused("weight_gradients: 3; legal are the constants 0 to 2", backward(given, pending));
  given[1].weight_gradients = UNIEP_WEIGHT_GRADIENTS_NONE;
  refused("weight_gradients: none on rank 1, later on rank 0", backward(given, pending));
  given = arguments(UNIEP_WEIGHT_GRADIENTS_LATER, 0);
  given[0].last_use = 2;
  refused("last_use: 2; legal are 0 and 1", backward(given, pending));
  given = arguments(UNIEP_WEIGHT_GRADIENTS_NOW, 0);
  given[1].gradients = nullptr;
  refused("dw1: null on rank 1", backward(given, pending));
  uniep_memory_need needs[2] = {};
  needs[0].size = needs[1].size = sizeof(needs[0]);
  const auto query = [&](int32_t time, int32_t last_use) {
    return uniep_query_backward_memory(group.get(), &layer.config, kSchedule, placement.get(), time, last_use, needs,
                                       2);
  };
  refused("weight_gradients: -1", query(-1, 0));
  refused("last_use: -1", query(0, -1));

  expect_ok(backward(arguments(UNIEP_WEIGHT_GRADIENTS_LATER, 0), pending));
  refused("group: null pointer", uniep_make_weight_gradients(nullptr, pending.get(), gradients.data(), 2));
  refused("pending: null pointer", uniep_make_weight_gradients(group.get(), nullptr, gradients.data(), 2));
  refused("arguments: null pointer", uniep_make_weight_gradients(group.get(), pending.get(), nullptr, 2));
  refused("count: 1; must be 2", uniep_make_weight_gradients(group.get(), pending.get(), gradients.data(), 1));
  gradients[1].sms = 3;
  refused("sms: 3 on rank 1; legal are 0 (all) to 2", make_gradients(pending));
  gradients[1].sms = 0;
  gradients[0].size = gradients[1].size = 24;
  refused("arguments.size: 24", make_gradients(pending));
  gradients[0].size = gradients[1].size = sizeof(gradients[0]);
  layer.gradients[1].size = 0;
  refused("gradients.size: 0", make_gradients(pending));
  layer.gradients[1].size = sizeof(uniep_weight_gradients);
  expect_ok(make_gradients(pending));
  EXPECT_EQ(difference(layer.result, expected), "");
  uniep_pending_destroy(nullptr);
}

}  // namespace
}  // namespace uniep::test
