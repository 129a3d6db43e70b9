#include "uniep/layer_object.h"

#include <gtest/gtest.h>

#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"

// A Layer beside the functions of layer.h that it is made of.
namespace uniep::test {
namespace {

GroupOptions cpu_options(int ranks) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = ranks;
  options.workers = 3;
  return options;
}

// The bits of the free functions, under Schedules that a seed draws, with all local ranks or the one that there is.
void run_objects(uint64_t seed, BranchCounts& branches) {
  const RandomLayer random = random_layer(seed, {.ranks = {1, 2, 4}, .most_local_experts = 4, .any_activation = true});
  Random draw(seed * 104729);
  Group group(cpu_options(random.ranks));
  const LayerConfig& config = random.config;
  const Schedule forward = sample_legal(draw.next(), {.direction = Direction::kForward,
                                                      .shape = config.shape,
                                                      .numerics = config.numerics,
                                                      .machine = group.machine()});
  PartialSchedule fixed;
  agree_on_saves(fixed, forward, draw, false);
  const Schedule backward = sample_legal(draw.next(),
                                         {.direction = Direction::kBackward,
                                          .shape = config.shape,
                                          .numerics = config.numerics,
                                          .machine = group.machine()},
                                         fixed);
  const Capacity capacity =
      draw.one_in(2) ? Capacity{} : Capacity{.rows = 128 * (config.shape.experts + random.data.all_tokens() * 32)};
  const WeightGradientTime time = draw.one_in(2) ? WeightGradientTime::kNow : WeightGradientTime::kLater;
  SCOPED_TRACE(random.description + "\n" + to_text(forward) + "\n" + to_text(backward));

  LayerArrays free(random), object(random);
  {
    const Placement placement = place(group, config.shape, free.routings, capacity);
    const Saved saved = uniep::forward(group, config, forward, placement, free.forward_arguments());
    free.gather_z(saved);
    const PendingWeightGradients work =
        uniep::backward(group, config, backward, saved, free.backward_arguments(time, false));
    if (!work.empty()) weight_gradients(group, work, free.weight_gradient_arguments());
  }

  const Layer layer(group, config.shape,
                    {.numerics = config.numerics,
                     .forward = PartialSchedule::from(forward),
                     .backward = PartialSchedule::from(backward),
                     .capacity = capacity});
  EXPECT_EQ(layer.schedule(Direction::kForward), forward);
  EXPECT_EQ(layer.schedule(Direction::kBackward), backward);
  const bool one = random.ranks == 1;
  const Placement placement = one ? layer.place(object.routings[0]) : layer.place(object.routings);
  const auto forward_arguments = object.forward_arguments();
  const Saved saved =
      one ? layer.forward(placement, forward_arguments[0]) : layer.forward(placement, forward_arguments);
  object.gather_z(saved);
  const auto backward_arguments = object.backward_arguments(time, false);
  const PendingWeightGradients work =
      one ? layer.backward(saved, backward_arguments[0]) : layer.backward(saved, backward_arguments);
  const auto gradient_arguments = object.weight_gradient_arguments();
  EXPECT_EQ(work.empty(), time == WeightGradientTime::kNow);
  if (!work.empty() && one) layer.weight_gradients(work, gradient_arguments[0]);
  if (!work.empty() && !one) layer.weight_gradients(work, gradient_arguments);

  EXPECT_EQ(difference(object.result, free.result), "");
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const auto needs = layer.memory_need(placement, {.direction = direction});
    const auto expected = memory_need(group, config, layer.schedule(direction), placement, {.direction = direction});
    ASSERT_EQ(needs.size(), expected.size());
    for (std::size_t i = 0; i < needs.size(); ++i) {
      EXPECT_EQ(needs[i].saved_bytes, expected[i].saved_bytes);
      EXPECT_EQ(needs[i].workspace_bytes, expected[i].workspace_bytes);
    }
  }
  branches.count("one rank", one);
  branches.count("several ranks", !one);
  branches.count("capacity", capacity.rows > 0);
  branches.count("weight gradients later", time == WeightGradientTime::kLater);
  branches.count("redispatch", forward.save_xg == SaveXg::kRedispatch);
  branches.count("FC1 again", forward.save_z == SaveZ::kRecompute);
}

TEST(LayerObject, GivesTheBitsOfTheFreeFunctions) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    run_objects(seed, branches);
    ASSERT_FALSE(HasFatalFailure() || HasNonfatalFailure()) << "case " << seed;
  }
  branches.expect_all_taken();
}

// One rank, two experts that take every token, all weights and inputs 1.
class OneRank : public testing::Test {
 protected:
  static constexpr LayerShape kShape{.hidden = 16, .intermediate = 8, .experts = 2, .topk = 1};
  Group group_{cpu_options(1)};
  const BFloat16 one_{0x3f80};
  std::vector<BFloat16> x_ = std::vector<BFloat16>(3 * 16, one_), y_ = x_, dx_ = x_,
                        w1_ = std::vector<BFloat16>(2 * 16 * 16, one_), w2_ = std::vector<BFloat16>(2 * 16 * 8, one_),
                        dw1_ = w1_, dw2_ = w2_;
  std::vector<int32_t> ids_{0, 1, 1};
  std::vector<float> probs_{1, 1, 1}, dprobs_{1, 1, 1};
  Weights weights_{.w1 = w1_.data(), .w2 = w2_.data()};

  Placement place(const Layer& layer) const {
    return layer.place({.tokens = 3, .topk_ids = ids_.data(), .probs = probs_.data()});
  }
  Saved forward(const Layer& layer) {
    return layer.forward(place(layer), {.x = x_.data(), .weights = weights_, .y = y_.data()});
  }
  BackwardArguments backward_arguments() {
    return {.dy = x_.data(),
            .x = x_.data(),
            .weights = weights_,
            .dx = dx_.data(),
            .dprobs = dprobs_.data(),
            .gradients = {.dw1 = dw1_.data(), .dw2 = dw2_.data()}};
  }
};

TEST_F(OneRank, SavedMemoryIsAttachedAgain) {
  const Layer layer(group_, kShape);
  const Placement placement = place(layer);
  const std::size_t bytes = layer.memory_need(placement)[0].saved_bytes;
  std::vector<std::byte> room(bytes + kMemoryAlignment);
  void* start = room.data();
  std::size_t space = room.size();
  const CallerMemory memory{std::align(kMemoryAlignment, bytes, start, space), bytes};
  layer.forward(placement, {.x = x_.data(), .weights = weights_, .y = y_.data(), .saved_memory = memory});
  layer.backward(layer.attach_saved(placement, memory), backward_arguments());
  const std::vector<BFloat16> attached = dx_;
  dx_.assign(dx_.size(), {0});
  layer.backward(forward(layer), backward_arguments());
  for (std::size_t i = 0; i < dx_.size(); ++i) EXPECT_EQ(dx_[i].bits, attached[i].bits) << i;
}

TEST_F(OneRank, BackwardSavesAsForwardDoes) {
  const Layer layer(group_, kShape, {.forward = PartialSchedule::parse("save.xg=redispatch")});
  EXPECT_EQ(layer.schedule(Direction::kBackward).save_xg, SaveXg::kRedispatch);
  EXPECT_EQ(layer.schedule(Direction::kBackward).save_z, SaveZ::kKeep);
  const Layer again(group_, kShape, {.forward = PartialSchedule::parse("save.z=recompute")});
  EXPECT_EQ(again.schedule(Direction::kBackward).save_z, SaveZ::kRecompute);
  expect_error(Status::kInvalidArgument, "save.z=keep needs a forward that keeps z", [&] {
    const Layer refused(
        group_, kShape,
        {.forward = PartialSchedule::parse("save.z=recompute"), .backward = PartialSchedule::parse("save.z=keep")});
  });
  layer.backward(forward(layer), backward_arguments());
  expect_error(Status::kInvalidArgument, "save.xg=keep needs a forward that keeps xg", [&] {
    Layer(
        group_, kShape,
        {.forward = PartialSchedule::parse("save.xg=redispatch"), .backward = PartialSchedule::parse("save.xg=keep")});
  });
}

TEST_F(OneRank, SchedulesChangeBetweenCalls) {
  Layer layer(group_, kShape);
  forward(layer);
  const std::vector<BFloat16> first = y_;
  Schedule sequential = layer.schedule(Direction::kForward);
  ASSERT_NE(sequential.fusion, Fusion::kNone);
  sequential.fusion = Fusion::kNone;
  sequential.order.interleave = Interleave::kPhased;
  layer.set_schedule(Direction::kForward, sequential);
  EXPECT_EQ(layer.schedule(Direction::kForward), sequential);
  y_.assign(y_.size(), {0});
  forward(layer);
  for (std::size_t i = 0; i < y_.size(); ++i) EXPECT_EQ(y_[i].bits, first[i].bits) << i;

  Schedule illegal = sequential;
  illegal.tile.n = 100;
  expect_error(Status::kInvalidArgument, "forward schedule: tile.n=100",
               [&] { layer.set_schedule(Direction::kForward, illegal); });
  EXPECT_EQ(layer.schedule(Direction::kForward), sequential);
}

// What was legal once is not asked again; that is nobody else's answer.
TEST_F(OneRank, EachScheduleIsCheckedForItsOwnLayerAndDirection) {
  const Layer layer(group_, kShape);
  const LayerConfig config{.shape = kShape};
  const Placement placement = place(layer);
  const auto run = [&](const Schedule& schedule, const LayerConfig& of) {
    const ForwardArguments arguments{.x = x_.data(), .weights = weights_, .y = y_.data()};
    return uniep::forward(group_, of, schedule, placement, {&arguments, 1});
  };
  const Schedule legal = layer.schedule(Direction::kForward);
  Schedule illegal = legal;
  illegal.order.raster = -1;
  constexpr int kRasters = 16, kMore = 2 * kRasters;  // than are remembered
  for (int i = 0; i < kMore; ++i) {
    Schedule other = legal;
    other.order.raster = i % kRasters + 1;
    other.order.source_rotation = i < kRasters;
    run(other, config);
    run(legal, config);
    expect_error(Status::kInvalidArgument, "order.raster=-1", [&] { run(illegal, config); });
  }
  expect_error(Status::kInvalidArgument, "schedule: combine_groups",
               [&] { run(legal, {.shape = kShape, .numerics = {.combine_groups = 3}}); });
  const Saved saved = run(legal, config);
  Schedule backward = layer.schedule(Direction::kBackward);
  backward.fusion = Fusion::kNone;
  backward.order.interleave = Interleave::kPhased;
  backward.wgrad = WgradOrder::kMixed;  // no field of forward
  run(backward, config);
  const BackwardArguments arguments = backward_arguments();
  expect_error(Status::kInvalidArgument, "wgrad", [&] {
    uniep::backward(group_, config, backward, saved, {&arguments, 1});
  });
}

TEST_F(OneRank, MisuseIsRefused) {
  expect_error(Status::kInvalidArgument, "hidden: 12",
               [&] { Layer(group_, {.hidden = 12, .intermediate = 8, .experts = 2, .topk = 1}); });
  expect_error(Status::kInvalidArgument, "combine_groups",
               [&] { Layer(group_, kShape, {.numerics = {.combine_groups = 3}}); });
  const Layer layer(group_, kShape);
  const Layer other(group_, {.hidden = 16, .intermediate = 16, .experts = 2, .topk = 1});
  expect_error(Status::kInvalidArgument, "placement: made for another shape than the layer's",
               [&] { other.forward(place(layer), {.x = x_.data(), .weights = weights_, .y = y_.data()}); });
  expect_error(Status::kInvalidArgument, "placement: made for another shape than the layer's",
               [&] { other.backward(forward(layer), backward_arguments()); });
  const Layer silu(group_, kShape, {.numerics = {.activation = Activation::kSilu}});
  expect_error(Status::kInvalidArgument, "activation: silu in backward; that forward ran with swiglu",
               [&] { silu.backward(forward(layer), backward_arguments()); });
  expect_error(Status::kInvalidArgument, "saved: empty", [&] { layer.backward(Saved{}, backward_arguments()); });
  expect_error(Status::kInvalidArgument, "work: empty", [&] { layer.weight_gradients({}, WeightGradientArguments{}); });
}

TEST(LayerObject, OneRanksArgumentsAreForAProcessThatHoldsOne) {
  Group group(cpu_options(2));
  const Layer layer(group, {.hidden = 16, .intermediate = 8, .experts = 2, .topk = 1});
  const std::string needed = "1 given; one for each of the 2 local ranks is needed";
  expect_error(Status::kInvalidArgument, "routings: " + needed, [&] { (void)layer.place(Routing{}); });
  const std::vector<Routing> empty(2);
  const Placement placement = layer.place(empty);
  expect_error(Status::kInvalidArgument, "arguments: " + needed, [&] { layer.forward(placement, ForwardArguments{}); });
}

}  // namespace
}  // namespace uniep::test
