// save.z = recompute: what backward runs before its own Program, and what a call without it says.
#include "program/recompute.h"

#include <gtest/gtest.h>

#include "engine/engine.h"
#include "model/place.h"
#include "program/checker.h"
#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/disturb.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"
#include "support/random_layer.h"

namespace uniep::test {
namespace {

std::shared_ptr<const internal::PlacementState> placement_of(const RandomLayer& layer) {
  const cli::LayerData& data = layer.data;
  std::vector<Routing> routings;
  for (int rank = 0; rank < layer.ranks; ++rank) {
    const int64_t first = data.first_token(rank) * data.shape.topk;
    routings.push_back({data.tokens[rank], data.ids.data() + first, IndexType::kInt32, data.probs.data() + first, {}});
  }
  return place_on_host(data.shape, layer.ranks, routings, {});
}

// The Schedule is legal wherever backward's is, and the Program is proved, as a call of its own.
void check_again(uint64_t seed, EngineKind engine, BranchCounts& branches) {
  const RandomLayer layer = random_layer(seed, {.ranks = {1, 2, 4}, .most_local_experts = 6});
  const LayerConfig& config = layer.config;
  Random random(seed * 31);
  Machine machine;
  machine.engine = engine;
  machine.ranks = layer.ranks;
  machine.workers = engine == EngineKind::kCuda ? 132 : static_cast<int>(random.between(1, 6));
  const ScheduleRequest backward{
      .direction = Direction::kBackward, .shape = config.shape, .numerics = config.numerics, .machine = machine};
  const Schedule schedule = sample_legal(random.next(), backward, PartialSchedule::parse("save.z=recompute"));
  SCOPED_TRACE(layer.description + "\n" + to_text(schedule));
  ScheduleRequest forward = backward;
  forward.direction = Direction::kForward;
  const Schedule again = recompute_schedule(schedule, backward);
  EXPECT_EQ(validate(again, forward), std::vector<std::string>());
  EXPECT_EQ(again, recompute_schedule(schedule, backward));

  ProgramRequest request{config.shape, config.numerics, again, Direction::kForward};
  request.workers = engine == EngineKind::kCuda ? static_cast<int>(random.between(1, 3)) * 2 : machine.workers;
  request.workers += again.comm.reserve_sms;
  request.part = ProgramPart::kRecompute;
  request.redispatch = schedule.save_xg == SaveXg::kRedispatch;
  request.cluster = random.one_in(2) && comes_in_clusters(again, request.workers, 2) ? 2 : 1;
  request.pull_parts = static_cast<int>(random.between(1, 8));
  const Program program(request, placement_of(layer));
  const CheckReport report = check_program(program);
  EXPECT_TRUE(report.ok) << (report.problems.empty() ? "" : report.problems.front());
  // A wait that is left out is seen wherever there is one.
  CheckTampering no_wait;
  bool touched = false;
  no_wait.wait = [&touched](int, const Task&, CounterWait& wait) {
    touched |= wait.space == CounterSpace::kFullRows;
    return wait.space != CounterSpace::kFullRows;
  };
  const bool ok = check_program(program, no_wait).ok;
  EXPECT_EQ(ok, !touched);
  EXPECT_TRUE(request.redispatch || !touched);
  branches.count("a wait for rows left out", touched);
  const RankProgram& p = program.rank(0);
  EXPECT_EQ(p.operands, request.redispatch ? 1 : 0);
  branches.count("rows in place", p.rows_in_place);
  branches.count("x dispatched in FC1's launch", p.launches == 1 && request.redispatch);
  branches.count("x dispatched in a launch before", p.launches == 2);
  branches.count("pushed", p.push && request.redispatch);
  branches.count("clusters", p.cluster == 2);
  branches.count("several parts of a pull", p.pull_parts > 1 && request.redispatch);
  branches.count("reserved workers", again.comm.reserve_sms > 0);
}

TEST(Recompute, ItsProgramIsProvedForAnyBackwardSchedule) {
  BranchCounts branches;
  const uint64_t cases = from_environment("UNIEP_TEST_COMBINATIONS", 200);
  for (uint64_t seed = 1; seed <= cases; ++seed) {
    check_again(seed, seed % 2 == 0 ? EngineKind::kCpu : EngineKind::kCuda, branches);
    if (HasFailure()) return;
  }
  branches.expect_all_taken();
}

class RecomputeCalls : public testing::Test {
 protected:
  RecomputeCalls() : layer_(random_layer(7, {.ranks = {2}, .columns = {{64, 128}}, .fewest_tokens = 8})) {}

  Schedule schedule(Group& group, Direction direction, const char* fields) const {
    return resolve(PartialSchedule::parse(fields), {.direction = direction,
                                                    .shape = layer_.config.shape,
                                                    .numerics = layer_.config.numerics,
                                                    .machine = group.machine()});
  }
  static GroupOptions options() {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = 2;
    options.workers = 2;
    return options;
  }

  RandomLayer layer_;
};

constexpr const char* kNothing = "save.xg=redispatch,save.z=recompute";

TEST_F(RecomputeCalls, NothingIsKeptAndASavedOfNothingIsOne) {
  Group group(options());
  LayerArrays arrays(layer_);
  const LayerConfig& config = layer_.config;
  const Schedule forward = schedule(group, Direction::kForward, kNothing);
  const Placement placement = place(group, config.shape, arrays.routings);
  for (const MemoryNeed& need : memory_need(group, config, forward, placement)) EXPECT_EQ(need.saved_bytes, 0u);
  const Saved saved = uniep::forward(group, config, forward, placement, arrays.forward_arguments());
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(saved.z(rank), nullptr);
  const Saved attached = attach_saved(group, config, forward, placement, std::vector<CallerMemory>(2));
  const Schedule backward = schedule(group, Direction::kBackward, kNothing);
  for (const Saved& one : {saved, attached}) {
    const std::vector<BFloat16> y = arrays.result.y;
    arrays.reset();
    arrays.result.y = y;
    uniep::backward(group, config, backward, one, arrays.backward_arguments(WeightGradientTime::kNow, false));
    EXPECT_EQ(difference(arrays.result, arrays.expected(WeightGradientTime::kNow)), "");
  }
}

TEST_F(RecomputeCalls, BackwardSaysWhatItLacks) {
  Group group(options());
  LayerArrays arrays(layer_);
  const LayerConfig& config = layer_.config;
  const Placement placement = place(group, config.shape, arrays.routings);
  const Saved saved = uniep::forward(group, config, schedule(group, Direction::kForward, kNothing), placement,
                                     arrays.forward_arguments());
  const auto refused = [&](const char* fields, const char* text, auto&& change) {
    std::vector<BackwardArguments> arguments = arrays.backward_arguments(WeightGradientTime::kNone, false, true);
    change(arguments);
    expect_error(Status::kInvalidArgument, text, [&] {
      uniep::backward(group, config, schedule(group, Direction::kBackward, fields), saved, arguments);
    });
  };
  const auto nothing = [](std::vector<BackwardArguments>&) {};
  refused("save.xg=redispatch", "save.z: keep in backward needs a forward that kept z", nothing);
  refused("save.z=recompute", "save.xg: keep in backward needs a forward that kept xg", nothing);
  refused(kNothing, "x (save.xg = redispatch)", [](auto& arguments) { arguments[1].x = nullptr; });
  if (!config.numerics.bias) return;
  refused(kNothing, "b1", [](auto& arguments) { arguments[0].weights.b1 = nullptr; });
}

}  // namespace
}  // namespace uniep::test
