// Groups on a stand-in for the CUDA driver: what they are given that is not legal, named.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/environment.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"
#include "support/loaded_fake_cuda.h"
#include "support/processes.h"

namespace uniep::test {
namespace {

constexpr int kTwoRanks = 2;

GroupOptions engine_options(EngineKind engine) {
  fake();
  GroupOptions options;
  options.engine = engine;
  options.ranks = kTwoRanks;
  if (engine == EngineKind::kCuda) options.devices = {0, 1};
  return options;
}

GroupOptions rank_options(int rank, const std::string& id) {
  GroupOptions options = engine_options(EngineKind::kCuda);
  options.launch = Launch::kProcesses;
  options.rank = rank;
  options.bootstrap = id;
  options.arrival_timeout_seconds = 20;
  return options;
}

std::vector<Process> start_two(const std::function<void(int, Group&, const Reporter&)>& body) {
  const std::string id = make_unique_id();
  std::vector<Process> processes;
  for (int rank = 0; rank < kTwoRanks; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      Group group(rank_options(rank, id));
      body(rank, group, reporter);
    });
  }
  return processes;
}

class GroupArguments : public ::testing::Test {
 protected:
  void TearDown() override { fake().reset(); }  // other tests' children count calls from here on
};

TEST_F(GroupArguments, ARankThatIsNotTheEnvironmentsIsRefused) {
  const ScopedRankVariables variables(
      {{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "29555"}});
  GroupOptions options = engine_options(EngineKind::kCuda);
  options.launch = Launch::kProcesses;
  options.ranks = 3;
  options.rank = 2;
  options.arrival_timeout_seconds = 0.2;
  expect_error(Status::kInvalidArgument, "rank: 2; the environment says RANK=1", [&] { const Group group(options); });
  for (const int rank : {0, 1}) {  // 0 is not given
    options.rank = rank;
    expect_error(Status::kTimeout, "did not come", [&] { const Group group(options); });
  }
}

TEST_F(GroupArguments, SymmetricMemoryOfNoLegalSizeIsRefused) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    Group group(engine_options(engine));
    std::vector<char> block(64);
    const std::vector<void*> memory(kTwoRanks, block.data());
    for (const std::size_t bytes : {kMost, kMost - 300, kMost / 2, kMost / 2 + 1}) {
      const std::string text = "bytes: " + std::to_string(bytes) + "; symmetric memory has at most 4611686018427387904";
      expect_error(Status::kInvalidArgument, text, [&] { group.allocate_symmetric(bytes); });
      expect_error(Status::kInvalidArgument, text, [&] { group.register_symmetric(memory, bytes); });
    }
    group.allocate_symmetric(100);
  }
}

TEST_F(GroupArguments, NoMemoryIsNoSymmetricMemory) {
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    Group group(engine_options(engine));
    std::vector<char> block(64);
    std::vector<void*> memory = {block.data(), nullptr};
    expect_error(Status::kInvalidArgument, "memory: null on rank 1", [&] { group.register_symmetric(memory, 64); });
    memory = {nullptr, block.data()};
    expect_error(Status::kInvalidArgument, "memory: null on rank 0", [&] { group.register_symmetric(memory, 64); });
    memory[0] = block.data();
    group.register_symmetric(memory, 64);
  }
  std::vector<Process> processes = start_two([](int rank, Group& group, const Reporter& reporter) {
    const SymmetricBuffer buffer = group.allocate_symmetric(1000);
    const std::vector<void*> memory = {rank == 1 ? nullptr : buffer.data(rank)};
    reporter.line(reporter.error_of([&] { group.register_symmetric(memory, 1000); }));
    reporter.line(reporter.error_of([&] { buffer.data(1 - rank); }));
    reporter.line(reporter.error_of([&] { group.allocate_symmetric(1000); }));  // the group goes on
  });
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    const std::string line = processes[rank].line();
    EXPECT_TRUE(line.starts_with("invalid argument: rank 1: the memory of 1000 bytes at 0 on device 1")) << line;
    const std::string own = std::to_string(rank);
    EXPECT_EQ(processes[rank].line(),
              "invalid argument: rank: " + std::to_string(1 - rank) + "; legal are " + own + " to " + own);
    EXPECT_EQ(processes[rank].line(), "none");
  }
}

// Its tables are those of the ranks of the process that placed.
TEST_F(GroupArguments, APlacementOfOtherLocalRanksIsRefused) {
  std::vector<Process> processes = start_two([](int rank, Group& group, const Reporter& reporter) {
    const RandomLayer layer = random_layer(4, {.ranks = {kTwoRanks}, .fewest_tokens = 8});
    LayerArrays arrays(layer);
    const auto own = static_cast<std::size_t>(rank);
    const Capacity capacity{4096, 128};
    const LayerConfig& config = layer.config;
    const auto schedule = [&](const Group& of) {
      return resolve({}, {.direction = Direction::kForward,
                          .shape = config.shape,
                          .numerics = config.numerics,
                          .machine = of.machine()});
    };
    const Placement alone = place(group, config.shape, std::vector{arrays.routings[own]}, capacity);
    Group all(engine_options(EngineKind::kCuda));
    const Placement of_all = place(all, config.shape, arrays.routings);
    reporter.line(reporter.error_of([&] { forward(all, config, schedule(all), alone, arrays.forward_arguments()); }));
    reporter.line(reporter.error_of([&] { memory_need(group, config, schedule(group), of_all); }));
  });
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    const std::string own = std::to_string(rank);
    EXPECT_EQ(processes[rank].line(), "invalid argument: placement: made where the first local rank is " + own +
                                          " of 1; the group's is 0 of 2");
    EXPECT_EQ(processes[rank].line(),
              "invalid argument: placement: made where the first local rank is 0 of 2; the "
              "group's is " +
                  own + " of 1");
  }
}

}  // namespace
}  // namespace uniep::test
