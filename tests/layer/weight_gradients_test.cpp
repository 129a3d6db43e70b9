#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "engine/cpu/engine.h"
#include "program/checker.h"
#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/disturb.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/layer_arrays.h"

// Weight gradients that come later or never, the last use of a Saved, and the memory of all of them.
namespace uniep::test {
namespace {

constexpr int64_t kWord = 64;  // bytes that a word takes: whether the backward failed
constexpr WeightGradientTime kNow = WeightGradientTime::kNow, kLater = WeightGradientTime::kLater,
                             kNone = WeightGradientTime::kNone;

// Counts the bytes of each rank, and says in the order of which stream the last block went back.
struct CountingAllocator {
  std::map<int, std::size_t> live, requested;
  std::map<int, void*> released_on;
  bool has_room = true;

  static void* allocate(void* context, std::size_t bytes, std::size_t alignment, int rank, Stream) {
    auto* self = static_cast<CountingAllocator*>(context);
    if (!self->has_room) return nullptr;
    self->live[rank] += bytes;
    self->requested[rank] += bytes;
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  static void release(void* context, void* memory, std::size_t bytes, int rank, Stream stream) {
    auto* self = static_cast<CountingAllocator*>(context);
    self->live[rank] -= bytes;
    self->released_on[rank] = stream.handle;
    ::operator delete(memory, std::align_val_t(256));
  }
  Allocator allocator() { return {allocate, release, this}; }
};

GroupOptions cpu_options(int ranks, int workers, CountingAllocator* counter = nullptr) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = ranks;
  options.workers = workers;
  if (counter != nullptr) options.allocator = counter->allocator();
  return options;
}

Schedule schedule_for(const Group& group, const LayerConfig& config, Direction direction, const std::string& text) {
  return resolve(
      PartialSchedule::parse(text),
      {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = group.machine()});
}

// Everything that one case draws.
struct Case {
  RandomLayer layer;
  GroupOptions options;
  internal::Disturbance disturbance;
  WeightGradientTime time = kNow;
  bool last_use = false;  // of the last backward
  bool capacity = false;
  int backwards = 1;
  uint64_t seed = 0;
};

Case random_case(uint64_t seed) {
  Random random(seed * 7919);
  Case drawn{random_layer(seed, {.most_local_experts = 6}),
             {},
             {},
             static_cast<WeightGradientTime>(random.between(0, 2)),
             random.one_in(2),
             random.one_in(4),
             static_cast<int>(random.between(1, 3)),
             random.next()};
  drawn.options = cpu_options(drawn.layer.ranks, static_cast<int>(random.between(1, 6)));
  if (!random.one_in(4)) drawn.disturbance.shuffle_seed = std::max<uint64_t>(random.next(), 1);
  return drawn;
}

void expect_counted(const CountingAllocator& counter, const std::vector<MemoryNeed>& needs,
                    const std::map<int, std::size_t>& live_before, const std::map<int, std::size_t>& requested_before,
                    bool kept) {
  const auto at = [](const std::map<int, std::size_t>& map, int rank) {
    const auto found = map.find(rank);
    return found == map.end() ? 0 : found->second;
  };
  for (int rank = 0; rank < static_cast<int>(needs.size()); ++rank) {
    const MemoryNeed& need = needs[rank];
    const std::size_t stays = need.saved_bytes + need.pending_bytes;
    EXPECT_EQ(at(counter.requested, rank) - at(requested_before, rank), stays + need.workspace_bytes);
    EXPECT_EQ(at(counter.live, rank) - at(live_before, rank), kept ? stays : 0);
  }
}

// Makes the gradients of one work, in one call or in two.
void make_gradients(Group& group, const PendingWeightGradients& work, LayerArrays& arrays, Random& random,
                    BranchCounts& branches) {
  const int64_t form = random.between(0, 3);  // two calls, dw2 or dw1 first; or one
  const int sms = random.one_in(2) ? static_cast<int>(random.between(0, group.workers())) : 0;
  branches.count("dw1 alone, then dw2", form == 0);
  branches.count("dw2 alone, then dw1", form == 1);
  branches.count("both in one call", form >= 2);
  branches.count("some compute units", sms > 0 && sms < group.workers());
  branches.count("all compute units", sms == 0);
  const auto call = [&](bool dw1, bool dw2) {
    std::vector<WeightGradientArguments> arguments = arrays.weight_gradient_arguments(dw1, dw2);
    for (WeightGradientArguments& own : arguments) own.sms = sms;
    weight_gradients(group, work, arguments);
  };
  if (form >= 2) return call(true, true);
  call(form == 0, form == 1);
  call(form == 1, form == 0);
}

void run_case(const Case& drawn, BranchCounts& branches) {
  SCOPED_TRACE(drawn.layer.description);
  Random random(drawn.seed);
  const LayerConfig& config = drawn.layer.config;
  LayerArrays arrays(drawn.layer);
  CountingAllocator counter;
  GroupOptions options = drawn.options;
  options.allocator = counter.allocator();
  Group group(options);
  disturb(group, drawn.disturbance);
  const Schedule forward_schedule = sample_legal(random.next(), {.direction = Direction::kForward,
                                                                 .shape = config.shape,
                                                                 .numerics = config.numerics,
                                                                 .machine = group.machine()});
  PartialSchedule fixed = PartialSchedule::parse("auto");
  agree_on_saves(fixed, forward_schedule, random);
  const Schedule schedule = sample_legal(random.next(),
                                         {.direction = Direction::kBackward,
                                          .shape = config.shape,
                                          .numerics = config.numerics,
                                          .machine = group.machine()},
                                         fixed);
  SCOPED_TRACE("forward " + to_text(forward_schedule) + "\nbackward " + to_text(schedule));

  Placement placement = place(group, config.shape, arrays.routings);
  if (drawn.capacity) {
    int64_t rows = 128;
    for (int rank = 0; rank < group.ranks(); ++rank) rows = std::max(rows, placement.padded_rows(rank));
    placement = place(group, config.shape, arrays.routings, {.rows = rows + 128 * random.between(0, 2)});
  }
  auto live = counter.live, requested = counter.requested;
  Saved saved = forward(group, config, forward_schedule, placement, arrays.forward_arguments());
  expect_counted(counter, memory_need(group, config, forward_schedule, placement), live, requested, true);

  std::vector<PendingWeightGradients> works;
  for (int call = 0; call < drawn.backwards; ++call) {
    const bool last_use = drawn.last_use && call + 1 == drawn.backwards;
    arrays.result.dx.assign(arrays.result.dx.size(), BFloat16{0xffff});
    if (drawn.time == kNow) {
      const std::vector<BFloat16> y = arrays.result.y;
      arrays.reset();
      arrays.result.y = y;
    }
    live = counter.live, requested = counter.requested;
    std::vector<TileEvent> events;
    works.push_back(backward(group, config, schedule, saved,
                             arrays.backward_arguments(drawn.time, last_use, schedule.save_z == SaveZ::kRecompute),
                             {&events}));
    expect_counted(
        counter,
        memory_need(group, config, schedule, placement,
                    {.weight_gradients = drawn.time, .last_use = last_use, .direction = Direction::kBackward}),
        live, requested, true);
    EXPECT_EQ(works.back().empty(), drawn.time != kLater);
    const bool has_wgrad = std::any_of(events.begin(), events.end(), [](const TileEvent& event) {
      return std::string(event.stage).find("wgrad") != std::string::npos;
    });
    EXPECT_EQ(has_wgrad, drawn.time == kNow);
  }
  const bool drop_saved = random.one_in(2);
  if (drop_saved) saved = Saved();

  const bool drop_work = drawn.time == kLater && works.size() > 1 && random.one_in(4);
  if (drop_work) works.pop_back();
  std::vector<std::size_t> order(works.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i-- > 1;) std::swap(order[i], order[random.next() % (i + 1)]);
  const std::vector<BFloat16> y = arrays.result.y, dx = arrays.result.dx;
  const std::vector<float> dprobs = arrays.result.dprobs;
  const cli::LayerResult expected = arrays.expected(drawn.time);
  for (const std::size_t i : order) {
    if (drawn.time == kLater) {
      arrays.reset();
      arrays.result.y = y;
      arrays.result.dx = dx;
      arrays.result.dprobs = dprobs;
      make_gradients(group, works[i], arrays, random, branches);
      works[i] = {};
    }
    ASSERT_EQ(difference(arrays.result, expected), "");
  }
  works.clear();
  saved = Saved();
  for (const auto& [rank, bytes] : counter.live) EXPECT_EQ(bytes, 0u) << rank;

  const bool keep = schedule.save_xg == SaveXg::kKeep, staged = schedule.combine.transport == CombineTransport::kStaged;
  for (const auto& [name, time] : {std::pair{"now", kNow}, {"later", kLater}, {"none", kNone}}) {
    const std::string text = name;
    const bool it = drawn.time == time;
    branches.count((text + ", may be used again, xg kept").c_str(), it && !drawn.last_use && keep);
    branches.count((text + ", may be used again, xg dispatched again").c_str(), it && !drawn.last_use && !keep);
    branches.count((text + ", last use, xg kept").c_str(), it && drawn.last_use && keep);
    branches.count((text + ", last use, xg dispatched again").c_str(), it && drawn.last_use && !keep);
    branches.count((text + ", staged").c_str(), it && staged);
    branches.count((text + ", several backwards").c_str(), it && drawn.backwards > 1);
  }
  branches.count("a work out of the order of the backwards",
                 drawn.time == kLater && !std::is_sorted(order.begin(), order.end()));
  branches.count("a work that is dropped", drop_work);
  branches.count("the saved dropped before its works", drop_saved && drawn.time == kLater);
  branches.count("within a capacity", drawn.capacity);
  branches.count("kept by forward, dispatched again by backward", forward_schedule.save_xg == SaveXg::kKeep && !keep);
  const bool recomputes = schedule.save_z == SaveZ::kRecompute;
  branches.count("FC1 again after a forward that kept z", recomputes && forward_schedule.save_z == SaveZ::kKeep);
  branches.count("FC1 again after a forward that did not", forward_schedule.save_z == SaveZ::kRecompute);
  branches.count("disturbed", drawn.disturbance.shuffle_seed != 0);
  count_layer(branches, drawn.layer);
}

TEST(WeightGradientTimes, EveryTimeGivesTheBitsOfTheSequentialRunInTheMemoryThatIsSaid) {
  BranchCounts branches;
  const uint64_t cases = from_environment("UNIEP_TEST_COMBINATIONS", 300);
  for (uint64_t seed = 1; seed <= cases; ++seed) {
    run_case(random_case(seed), branches);
    ASSERT_FALSE(HasFatalFailure() || HasNonfatalFailure()) << "case " << seed;
  }
  branches.expect_all_taken();
}

// A layer that adds to main_grad, with a batch of its own each time.
RandomLayer micro_batch(uint64_t seed, const RandomLayer& first) {
  Random random(seed);
  RandomLayer layer = first;
  std::rotate(layer.data.ids.begin(), layer.data.ids.begin() + seed * first.config.shape.topk, layer.data.ids.end());
  for (float& prob : layer.data.probs) prob = static_cast<float>(random.unit());
  std::rotate(layer.data.x.begin(), layer.data.x.begin() + 3 * seed, layer.data.x.end());
  std::rotate(layer.data.dy.begin(), layer.data.dy.begin() + 5 * seed, layer.data.dy.end());
  return layer;
}

TEST(WeightGradientTimes, MainGradIsTheSumInTheOrderOfTheCalls) {
  constexpr int kBatches = 8;
  RandomLayer first = random_layer(3, {.ranks = {2}, .most_local_experts = 3, .fewest_tokens = 12});
  first.config.numerics.weight_gradient = WeightGradient::kMainGrad;
  Group group(cpu_options(2, 3));
  const LayerConfig& config = first.config;
  const Schedule forward_schedule = schedule_for(group, config, Direction::kForward, "auto");
  const Schedule schedule = schedule_for(group, config, Direction::kBackward, "auto");
  std::vector<RandomLayer> layers;
  std::vector<std::unique_ptr<LayerArrays>> arrays;
  std::vector<Saved> saved;
  std::vector<PendingWeightGradients> works;
  for (int batch = 0; batch < kBatches; ++batch) layers.push_back(micro_batch(batch, first));
  for (const RandomLayer& layer : layers) {
    arrays.push_back(std::make_unique<LayerArrays>(layer));
    const Placement placement = place(group, config.shape, arrays.back()->routings);
    saved.push_back(forward(group, config, forward_schedule, placement, arrays.back()->forward_arguments()));
    works.push_back(backward(group, config, schedule, saved.back(), arrays.back()->backward_arguments(kLater, false)));
  }
  std::vector<cli::LayerResult> sums;
  Random random(17);
  for (int trial = 0; trial < 4; ++trial) {
    std::vector<int> order(kBatches);
    std::iota(order.begin(), order.end(), 0);
    for (int i = kBatches - 1; trial > 0 && i > 0; --i) std::swap(order[i], order[random.between(0, i)]);
    LayerArrays now(first), later(first);
    for (const int batch : order) {
      std::vector<BackwardArguments> arguments = arrays[batch]->backward_arguments(kNow, false);
      for (int rank = 0; rank < 2; ++rank) {
        arguments[rank].gradients = now.backward_arguments(kNow, false)[rank].gradients;
      }
      EXPECT_TRUE(backward(group, config, schedule, saved[batch], arguments).empty());
      weight_gradients(group, works[batch], later.weight_gradient_arguments());
      works[batch] = backward(group, config, schedule, saved[batch], arrays[batch]->backward_arguments(kLater, false));
    }
    EXPECT_EQ(difference(later.result, now.result), "");
    sums.push_back(later.result);
  }
  EXPECT_NE(difference(sums[0], sums[1]), "") << "the order of the calls must show in these sums";
}

// Weight gradients are the last thing that anything waits for, so a Program without them is as sound.
TEST(WeightGradientTimes, ProgramsWithoutWeightGradientsAreSound) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const Case drawn = random_case(seed);
    Group group(drawn.options);
    disturb(group, drawn.disturbance);
    const LayerConfig& config = drawn.layer.config;
    LayerArrays arrays(drawn.layer);
    const Schedule schedule = sample_legal(seed, {.direction = Direction::kBackward,
                                                  .shape = config.shape,
                                                  .numerics = config.numerics,
                                                  .machine = group.machine()});
    const auto& engine = dynamic_cast<const cpu::CpuEngine&>(group.implementation());
    ProgramRequest request = engine.request(config, schedule, Direction::kBackward, seed % 2 == 0);
    request.weight_gradients = false;
    const Program program(request, place(group, config.shape, arrays.routings).state());
    const CheckReport report = check_program(program);
    ASSERT_TRUE(report.ok) << drawn.layer.description << "\n" << to_text(schedule) << "\n" << report.problems.front();
  }
}

struct Expected {
  WeightGradientTime time;
  bool last_use;
  const char* schedule;
  int64_t saved, workspace, pending;  // bytes a padded row
};

TEST(WeightGradientTimes, MemoryIsWhatTheDocumentationSays) {
  RandomLayer layer = random_layer(5, {.ranks = {2}, .columns = {{64, 128}}, .fewest_tokens = 8});
  layer.config.numerics.combine_groups = 0;
  LayerArrays arrays(layer);
  Group group(cpu_options(2, 2));
  const LayerConfig& config = layer.config;
  const Placement placement = place(group, config.shape, arrays.routings);
  const int64_t h = 64, i = 128, sums = i / 16;
  const char *keep = "save.xg=keep,combine.transport=epilogue",
             *again = "save.xg=redispatch,combine.transport=epilogue",
             *staged = "save.xg=keep,combine.transport=staged",
             *again_z = "save.z=recompute,combine.transport=epilogue",
             *nothing = "save.xg=redispatch,save.z=recompute,combine.transport=epilogue";
  const Expected cases[] = {
      {kNow, false, keep, 4 * i + 2 * h, 2 * h + 6 * i + sums, 0},
      {kNow, true, keep, 4 * i + 2 * h, 2 * h + 2 * i + sums, 0},
      {kNow, false, again, 4 * i, 4 * h + 6 * i + sums, 0},
      {kNow, true, again, 4 * i, 4 * h + 2 * i + sums, 0},
      {kNow, true, staged, 4 * i + 2 * h, 4 * h + 2 * i + sums, 0},
      {kNone, false, keep, 4 * i + 2 * h, 2 * h + 6 * i + sums, 0},
      {kNone, true, again, 4 * i, 2 * h + 2 * i + sums, 0},
      {kNow, false, again_z, 2 * h, 2 * h + 6 * i + sums, 0},
      {kNow, true, again_z, 2 * h, 2 * h + 6 * i + sums, 0},
      {kLater, false, again_z, 2 * h, sums, 2 * h + 6 * i},
      {kNow, true, nothing, 0, 4 * h + 6 * i + sums, 0},
      {kNone, false, nothing, 0, 4 * h + 6 * i + sums, 0},
      {kLater, true, nothing, 0, sums, 4 * h + 6 * i},
      {kLater, false, keep, 4 * i + 2 * h, sums, 2 * h + 6 * i},
      {kLater, true, keep, 4 * i + 2 * h, sums, 2 * h + 2 * i},
      {kLater, false, again, 4 * i, sums, 4 * h + 6 * i},
      {kLater, true, again, 4 * i, sums, 4 * h + 2 * i},
      {kLater, false, staged, 4 * i + 2 * h, sums + 2 * h, 2 * h + 6 * i},
  };
  for (const Expected& expected : cases) {
    SCOPED_TRACE(expected.schedule);
    const Schedule forward = schedule_for(group, config, Direction::kForward, expected.schedule);
    const Schedule backward = schedule_for(group, config, Direction::kBackward, expected.schedule);
    const auto saved = memory_need(group, config, forward, placement);
    const auto needs = memory_need(
        group, config, backward, placement,
        {.weight_gradients = expected.time, .last_use = expected.last_use, .direction = Direction::kBackward});
    const bool again_x = expected.schedule == again || expected.schedule == nothing;
    const bool no_z = expected.schedule == again_z || expected.schedule == nothing;
    const int64_t more = (again_x ? 2 * h : 0) + (no_z ? 4 * i : 0) + (expected.schedule == staged ? 2 * h : 0);
    for (int rank = 0; rank < 2; ++rank) {
      const int64_t rows = placement.padded_rows(rank);
      EXPECT_EQ(saved[rank].workspace_bytes, static_cast<std::size_t>(rows * (2 * i + more)));
      EXPECT_EQ(saved[rank].saved_bytes, static_cast<std::size_t>(rows * expected.saved));
      EXPECT_EQ(saved[rank].pending_bytes, 0u);
      EXPECT_EQ(needs[rank].saved_bytes, 0u);
      EXPECT_EQ(needs[rank].workspace_bytes, static_cast<std::size_t>(rows * expected.workspace));
      const int64_t word = expected.time == kLater ? kWord : 0;
      EXPECT_EQ(needs[rank].pending_bytes, static_cast<std::size_t>(rows * expected.pending + word));
    }
  }
}

class WeightGradientMisuse : public testing::Test {
 protected:
  WeightGradientMisuse() {
    placement = place(group, config.shape, arrays.routings);
    saved = forward(group, config, schedule_for(group, config, Direction::kForward, "save.xg=keep"), placement,
                    arrays.forward_arguments());
  }
  static GroupOptions impatient(GroupOptions options) {
    options.timeout_seconds = 1;
    return options;
  }
  PendingWeightGradients run_backward(WeightGradientTime time, bool last_use = false) {
    return backward(group, config, schedule, saved, arrays.backward_arguments(time, last_use));
  }
  void refused(const std::string& text, const std::vector<BackwardArguments>& arguments) {
    expect_error(Status::kInvalidArgument, text, [&] { backward(group, config, schedule, saved, arguments); });
  }
  void refused(const std::string& text, const PendingWeightGradients& work,
               const std::vector<WeightGradientArguments>& arguments) {
    expect_error(Status::kInvalidArgument, text, [&] { weight_gradients(group, work, arguments); });
  }

  const RandomLayer layer = random_layer(95, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8});
  const LayerConfig& config = layer.config;
  LayerArrays arrays{layer};
  CountingAllocator counter;
  Group group{impatient(cpu_options(2, 3, &counter))};
  const Schedule schedule = schedule_for(group, config, Direction::kBackward, "save.xg=keep");
  Placement placement;
  Saved saved;
};

TEST_F(WeightGradientMisuse, OfBackwardIsNamedAndChangesNothing) {
  auto arguments = arrays.backward_arguments(kNow, false);
  arguments[1].weight_gradients = kLater;
  refused("weight_gradients: later on rank 1, now on rank 0; it must be equal on all ranks", arguments);
  arguments[0].weight_gradients = arguments[1].weight_gradients = static_cast<WeightGradientTime>(3);
  refused("weight_gradients: 3; legal are now (0), later (1) and none (2)", arguments);
  arguments = arrays.backward_arguments(kNow, true);
  arguments[1].last_use = false;
  refused("last_use: false on rank 1, true on rank 0; it must be equal on all ranks", arguments);
  arguments = arrays.backward_arguments(kNow, true);
  arguments[1].gradients.dw2 = nullptr;
  refused("dw2: null on rank 1", arguments);
  expect_error(Status::kInvalidArgument, "weight_gradients: -1", [&] {
    memory_need(group, config, schedule, placement,
                {.weight_gradients = static_cast<WeightGradientTime>(-1), .direction = Direction::kBackward});
  });
  counter.has_room = false;
  expect_error(Status::kOutOfMemory, "no room", [&] { run_backward(kLater, true); });
  counter.has_room = true;
  // The Saved is still good for a use, and for one.
  EXPECT_TRUE(run_backward(kNow, true).empty());
  EXPECT_EQ(difference(arrays.result, arrays.expected(kNow)), "");
  for (const WeightGradientTime time : {kNow, kLater, kNone}) {
    refused("saved: used up by an earlier backward with last_use", arrays.backward_arguments(time, time == kNow));
  }
}

TEST_F(WeightGradientMisuse, OfAWorkIsNamedAndChangesNothing) {
  refused("work: empty", {}, arrays.weight_gradient_arguments());
  refused("work: empty", run_backward(kNone), arrays.weight_gradient_arguments());
  arrays.reset();
  arrays.result.y = arrays.expected(kNow).y;
  const PendingWeightGradients work = run_backward(kLater);
  auto arguments = arrays.weight_gradient_arguments();
  arguments.pop_back();
  refused("arguments: 1 given; one for each of the 2 local ranks is needed", work, arguments);
  refused("dw1: null on rank 0", work, arrays.weight_gradient_arguments(false, false));
  arguments = arrays.weight_gradient_arguments();
  arguments[1].gradients.dw1 = nullptr;
  refused("dw1: null on rank 1", work, arguments);
  arguments = arrays.weight_gradient_arguments(true, false);
  arguments[1] = arrays.weight_gradient_arguments()[1];
  refused("gradients: dw2 on rank 1 and not on rank 0; all local ranks ask for the same ones", work, arguments);
  arguments = arrays.weight_gradient_arguments();
  const std::vector<void*> experts(static_cast<std::size_t>(config.shape.experts));
  arguments[1].gradients.dw2_experts = experts.data();
  refused("dw2: null for local expert 0 on rank 1", work, arguments);
  for (const int sms : {-1, 4}) {
    arguments = arrays.weight_gradient_arguments();
    arguments[1].sms = sms;
    refused("sms: " + std::to_string(sms) + " on rank 1; legal are 0 (all) to 3", work, arguments);
  }
  Group other(cpu_options(1, 2));
  expect_error(Status::kInvalidArgument, "work: of another group",
               [&] { weight_gradients(other, work, arrays.weight_gradient_arguments()); });

  weight_gradients(group, work, arrays.weight_gradient_arguments(false, true));
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): a copy is the same work
  const PendingWeightGradients copy = work;
  refused("work: its dw2 has been made; each work is done once", copy, arrays.weight_gradient_arguments(false, true));
  refused("work: its dw2 has been made; each work is done once", copy, arrays.weight_gradient_arguments());
  weight_gradients(group, copy, arrays.weight_gradient_arguments(true, false));
  refused("work: its dw1 has been made; each work is done once", work, arrays.weight_gradient_arguments());
  EXPECT_EQ(difference(arrays.result, arrays.expected(kNow)), "");
}

TEST_F(WeightGradientMisuse, AfterATimeOutTheSavedIsUsedUpAndOlderWorksAreNot) {
  const PendingWeightGradients work = run_backward(kLater);
  auto& engine = dynamic_cast<cpu::CpuEngine&>(group.implementation());
  engine.plant(cpu::Fault::kSilentWorker);
  expect_error(Status::kTimeout, "time-out", [&] { run_backward(kLater, true); });
  engine.plant(cpu::Fault::kNone);
  weight_gradients(group, work, arrays.weight_gradient_arguments());
  group.recover();
  refused("saved: used up", arrays.backward_arguments(kNow, false));
}

TEST_F(WeightGradientMisuse, MemoryGoesBackInTheOrderOfTheStreamThatUsedItLast) {
  int streams[2];
  {
    const PendingWeightGradients work = run_backward(kLater);
    saved = Saved();
    auto arguments = arrays.weight_gradient_arguments();
    for (int rank = 0; rank < 2; ++rank) arguments[rank].stream.handle = &streams[rank];
    weight_gradients(group, work, arguments);
    EXPECT_EQ(counter.released_on[0], nullptr);
  }
  EXPECT_EQ(counter.released_on[0], &streams[0]);
  EXPECT_EQ(counter.released_on[1], &streams[1]);
  EXPECT_EQ(counter.live[0] + counter.live[1], 0u);
}

}  // namespace
}  // namespace uniep::test
