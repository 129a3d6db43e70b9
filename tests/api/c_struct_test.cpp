#include "api/c_struct.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <string>

#include "support/c_layer.h"
#include "support/expect_error.h"

// Structures of callers that were built with the headers of another version.
namespace uniep {
namespace {

// A structure that has grown by a field since its first version.
struct Grown {
  std::size_t size;
  int64_t first;
  int64_t added;
};
struct Earlier {
  std::size_t size;
  int64_t first;
};

}  // namespace

template <>
inline constexpr std::size_t kFirstSize<Grown> = sizeof(Earlier);

namespace test {
namespace {

TEST(CStruct, WhatAnEarlierCallerDoesNotHaveIsZero) {
  const std::array<Earlier, 3> given = {{{sizeof(Earlier), 1}, {sizeof(Earlier), 2}, {sizeof(Earlier), 3}}};
  const std::vector<Grown> read = read_structs<Grown>(given.data(), 2, "given");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].first, 1);
  EXPECT_EQ(read[1].first, 2);
  EXPECT_EQ(read[0].added, 0);
  EXPECT_EQ(read[1].added, 0);
}

TEST(CStruct, NothingIsWrittenBehindAnEarlierCallersFields) {
  std::array<Earlier, 2> out = {{{sizeof(Earlier), 1}, {7, 8}}};
  write_struct(Grown{0, 5, 6}, out.data(), sizeof(Earlier));
  EXPECT_EQ(out[0].size, sizeof(Earlier));
  EXPECT_EQ(out[0].first, 5);
  EXPECT_EQ(out[1].size, 7u);
  EXPECT_EQ(out[1].first, 8);
}

TEST(CStruct, LessThanTheFirstVersionIsRefused) {
  const Earlier given{sizeof(Earlier) - 1, 1};
  expect_error(Status::kInvalidArgument, "given.size: 15; must be sizeof(the structure), 16 to 4096",
               [&] { read_struct<Grown>(&given, "given"); });
}

class CStructures : public testing::Test {
 protected:
  CStructures() : random(random_layer(3, {{2}, 4, 16, 32})), layer(random), group(make_group(group_options(2))) {
    placement = layer.place(group.get());
  }

  uniep_status place(const uniep_layer_config& config) {
    uniep_placement* made = nullptr;
    return uniep_place(group.get(), &config, layer.routings.data(), 2, nullptr, &made);
  }
  uniep_status forward(const uniep_forward_arguments& arguments) {
    uniep_saved* made = nullptr;
    const uniep_status status =
        uniep_forward(group.get(), &layer.config, "auto", placement.get(), &arguments, 2, &made);
    EXPECT_EQ(made == nullptr, status != UNIEP_OK);
    uniep_saved_destroy(made);
    return status;
  }

  RandomLayer random;
  CLayer layer;
  GroupHandle group;
  PlacementHandle placement;
};

TEST_F(CStructures, OfLaterCallersMayNotSetWhatIsNotKnown) {
  struct FutureArguments {
    uniep_forward_arguments known;
    uint64_t added;
  };
  FutureArguments future[2] = {{layer.forward_arguments[0], 0}, {layer.forward_arguments[1], 0}};
  future[0].known.size = future[1].known.size = sizeof(FutureArguments);
  expect_ok(forward(future[0].known));
  future[1].added = 1;
  const std::string known = std::to_string(sizeof(uniep_forward_arguments));
  expect_failure(UNIEP_UNSUPPORTED, "arguments: byte " + known, forward(future[0].known));
  future[1] = {layer.forward_arguments[1], 0};
  expect_failure(
      UNIEP_INVALID_ARGUMENT,
      "arguments[1].size: " + known + "; must be that of the first entry, " + std::to_string(sizeof(FutureArguments)),
      forward(future[0].known));
}

// Weights are read where the arguments point to, so that they may be of another version than these.
TEST_F(CStructures, WeightsOfLaterCallersLikewise) {
  struct FutureWeights {
    uniep_weights known;
    uint64_t added;
  } future{layer.weights[0], 0};
  future.known.size = sizeof(future);
  layer.forward_arguments[0].weights = &future.known;
  expect_ok(forward(layer.forward_arguments[0]));
  future.added = 1;
  expect_failure(UNIEP_UNSUPPORTED, "weights: byte " + std::to_string(sizeof(uniep_weights)),
                 forward(layer.forward_arguments[0]));
}

TEST_F(CStructures, SizesThatAreNone) {
  uniep_layer_config config = layer.config;
  config.size = 87;  // the first version has 88
  expect_failure(UNIEP_INVALID_ARGUMENT, "config.size: 87", place(config));
  config.size = 0;
  expect_failure(UNIEP_INVALID_ARGUMENT, "config.size: 0", place(config));
  config.size = 4097;
  expect_failure(UNIEP_INVALID_ARGUMENT, "config.size: 4097; must be sizeof(the structure), 88 to 4096", place(config));
  uniep_group_info unset{};
  unset.size = ~std::size_t{0} / 2;
  expect_failure(UNIEP_INVALID_ARGUMENT, "size: 9223372036854775807", uniep_group_describe(group.get(), &unset));
}

TEST_F(CStructures, OfLaterCallersAreWrittenWithZeros) {
  struct FutureInfo {
    uniep_group_info known;
    uint64_t added;
  } info{};
  info.known.size = sizeof(info);
  info.added = 1;
  expect_ok(uniep_group_describe(group.get(), &info.known));
  EXPECT_EQ(info.known.size, sizeof(info));
  EXPECT_EQ(info.known.engine, UNIEP_ENGINE_CPU);
  EXPECT_EQ(info.known.ranks, 2);
  EXPECT_EQ(info.known.workers, 2);
  EXPECT_EQ(info.known.first_local_rank, 0);
  EXPECT_EQ(info.known.local_ranks, 2);
  EXPECT_EQ(info.added, 0u);
}

}  // namespace
}  // namespace test
}  // namespace uniep
