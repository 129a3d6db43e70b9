#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "cli/layer_runner.h"
#include "cli/trace_file.h"
#include "engine/cpu/engine.h"
#include "io/file.h"
#include "support/c_layer.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

// What a group tells of itself: what has failed, what it holds, when its tiles ran.
namespace uniep::test {
namespace {

RandomLayer two_ranks() {
  return random_layer(20, {.ranks = {2}, .fewest_tokens = 8});
}

TEST(GroupCheck, TellsOfACallThatFailedHalfWayUntilTheGroupRecovers) {
  const RandomLayer layer = two_ranks();
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 2;
  options.timeout_seconds = 0.2;
  Group group(options);
  group.check();
  auto& engine = dynamic_cast<cpu::CpuEngine&>(group.implementation());
  engine.plant(cpu::Fault::kSilentWorker);
  cli::LayerRunner runner(group, layer.config, layer.data);
  const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                         .shape = layer.config.shape,
                                         .numerics = layer.config.numerics,
                                         .machine = group.machine()});
  EXPECT_THROW(runner.forward(schedule), Error);
  engine.plant(cpu::Fault::kNone);
  for (int again = 0; again < 2; ++again) {
    expect_error(Status::kTimeout, "an earlier call failed half-way", [&] { group.check(); });
  }
  group.recover();
  group.check();
}

TEST(GroupMemory, GrowsWithWhatCallsNeedAndIsKept) {
  const RandomLayer random = two_ranks();
  const CLayer layer(random);
  const GroupHandle group = make_group(group_options(2));
  const auto memory = [&](int32_t rank) {
    uniep_group_bytes bytes{sizeof(bytes), 1, 1};
    expect_ok(uniep_group_memory(group.get(), rank, &bytes));
    EXPECT_EQ(bytes.size, sizeof(bytes));
    EXPECT_EQ(bytes.workspace_bytes, 0u);  // the cpu engine gives it back
    return bytes.symmetric_bytes;
  };
  expect_ok(uniep_group_check(group.get()));
  EXPECT_EQ(memory(0), 0u);
  const PlacementHandle placement = layer.place(group.get());
  EXPECT_EQ(memory(1), 0u);
  layer.forward(group.get(), placement.get(), "auto");
  uniep_memory_need needs[2] = {{sizeof(needs[0]), 0, 0, 0, 0}, {sizeof(needs[0]), 0, 0, 0, 0}};
  expect_ok(uniep_query_forward_memory(group.get(), &layer.config, "auto", placement.get(), 1, needs, 2));
  for (int32_t rank = 0; rank < 2; ++rank) EXPECT_EQ(memory(rank), needs[rank].symmetric_bytes) << rank;
  const std::size_t before = memory(0);
  layer.forward(group.get(), placement.get(), "auto");
  EXPECT_EQ(memory(0), before);

  uniep_group_bytes bytes{sizeof(bytes), 0, 0};
  expect_failure(UNIEP_INVALID_ARGUMENT, "rank: 2; legal are 0 to 1", uniep_group_memory(group.get(), 2, &bytes));
  expect_failure(UNIEP_INVALID_ARGUMENT, "bytes: null pointer", uniep_group_memory(group.get(), 0, nullptr));
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null pointer", uniep_group_memory(nullptr, 0, &bytes));
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null pointer", uniep_group_check(nullptr));
  bytes.size = 8;
  expect_failure(UNIEP_INVALID_ARGUMENT, "bytes.size: 8", uniep_group_memory(group.get(), 0, &bytes));
}

class CTrace : public ::testing::Test {
 protected:
  CTrace()
      : random(two_ranks()), layer(random), group(make_group(group_options(2))), placement(layer.place(group.get())) {}

  void run() {
    const SavedHandle saved = layer.forward(group.get(), placement.get(), "auto");
    expect_ok(layer.backward(group.get(), saved.get(), "auto"));
  }
  cli::Trace written(const std::string& name) {
    const std::string path = (folder / name).string();
    expect_ok(uniep_trace_end(group.get(), path.c_str()));
    return cli::parse_trace(io::read_text_file(path), path);
  }

  RandomLayer random;
  CLayer layer;
  GroupHandle group;
  PlacementHandle placement;
  TemporaryFolder folder;
};

TEST_F(CTrace, HoldsTheCallsBetweenItsBeginAndItsEnd) {
  run();
  expect_ok(uniep_trace_begin(group.get()));
  run();
  const cli::LayerResult traced = layer.result;
  const cli::Trace trace = written("both.json");
  ASSERT_EQ(trace.marks.size(), 2u);
  EXPECT_EQ(trace.marks[0].name, "forward");
  EXPECT_EQ(trace.marks[1].name, "backward");
  std::set<std::string> stages, processes;
  for (const cli::TraceSlice& slice : trace.slices) {
    stages.insert(slice.category);
    processes.insert(trace.lanes[slice.lane].process);
  }
  for (const char* stage : {"dispatch", "fc1", "fc2", "wgrad_fc1"}) EXPECT_TRUE(stages.contains(stage)) << stage;
  EXPECT_EQ(processes, (std::set<std::string>{"rank 0", "rank 1"}));
  run();
  EXPECT_EQ(difference(layer.result, traced), "");

  expect_ok(uniep_trace_begin(group.get()));
  run();
  expect_ok(uniep_trace_begin(group.get()));  // drops what there is
  layer.forward(group.get(), placement.get(), "auto");
  EXPECT_EQ(written("one.json").marks.size(), 1u);
}

TEST_F(CTrace, SaysWhatIsWrong) {
  const std::string path = (folder / "none.json").string(), lost = (folder / "no").string() + "/folder.json";
  expect_failure(UNIEP_INVALID_ARGUMENT, "nothing is recorded", uniep_trace_end(group.get(), path.c_str()));
  EXPECT_EQ(folder.entries(), 0u);
  expect_ok(uniep_trace_begin(group.get()));
  run();
  expect_failure(UNIEP_INVALID_ARGUMENT, "path: null pointer", uniep_trace_end(group.get(), nullptr));
  expect_failure(UNIEP_IO, "cannot write file '" + lost, uniep_trace_end(group.get(), lost.c_str()));
  expect_failure(UNIEP_INVALID_ARGUMENT, "nothing is recorded", uniep_trace_end(group.get(), path.c_str()));
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null pointer", uniep_trace_begin(nullptr));
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null pointer", uniep_trace_end(nullptr, path.c_str()));
}

}  // namespace
}  // namespace uniep::test
