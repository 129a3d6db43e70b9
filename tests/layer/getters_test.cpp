#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/layer_arrays.h"

// Getters of what calls give refuse what is not there, by name.
namespace uniep::test {
namespace {

constexpr int64_t kExperts = 4;

class Getters : public ::testing::Test {
 protected:
  Getters() {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = 2;
    options.workers = 2;
    group = std::make_unique<Group>(options);
  }

  template <typename Get>
  void refuses(const char* name, int64_t end, const Get& get) {
    for (const int64_t value : {int64_t{-1}, end, end + 5, int64_t{std::numeric_limits<int32_t>::max()}}) {
      expect_error(Status::kInvalidArgument,
                   std::string(name) + ": " + std::to_string(value) + "; legal are 0 to " + std::to_string(end - 1),
                   [&] { get(value); });
    }
  }

  std::unique_ptr<Group> group;
};

TEST_F(Getters, OfAPlacement) {
  const int32_t ids[] = {0, 3};
  const float probs[] = {1, 1};
  const Routing routing{.tokens = 2, .topk_ids = ids, .probs = probs};
  const Placement placed = place(*group, {64, 32, kExperts, 1}, std::vector{routing, routing});
  EXPECT_EQ(placed.rows(1), 2);
  EXPECT_EQ(placed.routed(1, 3), 1);
  refuses("rank", 2, [&](int64_t rank) { placed.rows(static_cast<int>(rank)); });
  refuses("rank", 2, [&](int64_t rank) { placed.padded_rows(static_cast<int>(rank)); });
  refuses("rank", 2, [&](int64_t rank) { placed.tokens(static_cast<int>(rank)); });
  refuses("rank", 2, [&](int64_t rank) { placed.dense(static_cast<int>(rank)); });
  refuses("expert", kExperts, [&](int64_t expert) { placed.expert_rows(expert); });
  refuses("expert", kExperts, [&](int64_t expert) { placed.expert_segment(expert); });
  refuses("source_rank", 2, [&](int64_t rank) { placed.routed(static_cast<int>(rank), 0); });
  refuses("expert", kExperts, [&](int64_t expert) { placed.routed(0, expert); });

  const Placement empty;
  const auto is_empty = [&](const auto& get) {
    expect_error(Status::kInvalidArgument, "placement: empty; call place() first", get);
  };
  is_empty([&] { empty.rows(0); });
  is_empty([&] { empty.padded_rows(0); });
  is_empty([&] { empty.tokens(0); });
  is_empty([&] { empty.dense(0); });
  is_empty([&] { empty.expert_rows(0); });
  is_empty([&] { empty.expert_segment(0); });
  is_empty([&] { empty.routed(0, 0); });
}

TEST_F(Getters, OfASaved) {
  const RandomLayer layer = random_layer(95, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8});
  LayerArrays arrays(layer);
  const Placement placement = place(*group, layer.config.shape, arrays.routings);
  const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                         .shape = layer.config.shape,
                                         .numerics = layer.config.numerics,
                                         .machine = group->machine()});
  const Saved saved = forward(*group, layer.config, schedule, placement, arrays.forward_arguments());
  EXPECT_NE(saved.z(1), nullptr);
  refuses("rank", 2, [&](int64_t rank) { saved.z(static_cast<int>(rank)); });
  expect_error(Status::kInvalidArgument, "saved: empty; it comes from forward()", [] { Saved().z(0); });
  expect_error(Status::kInvalidArgument, "saved: empty; it comes from forward()", [] { Saved().placement(); });
}

TEST_F(Getters, OfMemoryAndDevices) {
  const SymmetricBuffer buffer = group->allocate_symmetric(100);
  EXPECT_NE(buffer.data(1), nullptr);
  refuses("rank", 2, [&](int64_t rank) { buffer.data(static_cast<int>(rank)); });
  refuses("rank", 2, [&](int64_t rank) { group->device(static_cast<int>(rank)); });
  refuses("rank", 2, [&](int64_t rank) { group->memory(static_cast<int>(rank)); });
  expect_error(Status::kInvalidArgument, "buffer: empty", [] { SymmetricBuffer().data(0); });
  expect_error(Status::kInvalidArgument, "buffer: empty", [] { SymmetricBuffer().bytes(); });
}

}  // namespace
}  // namespace uniep::test
