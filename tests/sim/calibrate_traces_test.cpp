#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/calibrate_report.h"
#include "cli/timeline_model.h"
#include "io/file.h"
#include "support/expect_error.h"
#include "support/other_machine.h"
#include "support/temporary_folder.h"

// The fit of a machine description to timelines, without a GPU: to those that the simulator makes of a machine whose
// constants are others, with the noise of a recorded one. No timeline of a GPU that says what it ran is in the
// repository.
namespace uniep::cli {
namespace {

using sim::MachineDescription;
using sim::State;
using test::other_machine;

// One call that is recorded.
struct Recorded {
  LayerShape shape = {4096, 1536, 16, 8};
  int ranks = 1;
  int64_t tokens = 1024;
  const char* schedule = "auto";
  Direction direction = Direction::kForward;
  State state = State::kSustained;
  const char* routing = "uniform";
  bool says_state = false;
};

LayerOptions options_of(const Recorded& call) {
  LayerOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = call.ranks;
  options.shape = call.shape;
  options.tokens_given = {call.tokens};
  options.routing = call.routing;
  options.schedule = PartialSchedule::parse(call.schedule);
  return options;
}

// Clocks of one call are up to a percent off those of the next, and records up to 0.2 us late.
class Noise {
 public:
  explicit Noise(uint64_t seed) : random_(seed), clock_(1 + 0.01 * uniform()) {}
  void disturb(TileEvent& event) {
    for (int64_t* time : {&event.wait_begin_ns, &event.begin_ns, &event.end_ns}) {
      *time = static_cast<int64_t>(static_cast<double>(*time) * clock_);
    }
    event.begin_ns += late();
    event.end_ns = std::max(event.begin_ns, event.end_ns + late());
  }

 private:
  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53 * 2 - 1; }
  int64_t late() { return static_cast<int64_t>(100 * (1 + uniform())); }
  std::mt19937_64 random_;
  double clock_;
};

// A file as the cuda engine would write it on such a machine.
std::string record(const MachineDescription& machine, const Recorded& call, const std::string& file, uint64_t seed) {
  const LayerOptions options = options_of(call);
  const Schedule schedule = options.resolved(call.direction, sim::schedule_machine(machine, call.ranks));
  const Program program(sim::simulated_request(call.shape, options.numerics, schedule, call.direction, machine),
                        place_ids(options, make_ids(options)).state());
  const sim::Simulated made = sim::simulate(program, machine, {.state = call.state, .record = true});
  TracedCall traced{call.direction == Direction::kForward ? "forward" : "backward",
                    sim::tile_events(program, made.timeline)};
  Noise noise(seed);
  for (TileEvent& event : traced.events) noise.disturb(event);
  const int units = static_cast<int>(machine.class_of(sim::Work::kFc1).count);
  traced.layer = traced_layer(options, schedule, {"cuda", "Made-up GPU", call.ranks, units, units},
                              call.says_state ? std::optional(call.state) : std::nullopt);
  std::ofstream(file, std::ios::trunc) << trace_json("", std::span(&traced, 1));
  return file;
}

class CalibrateTraces : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  std::vector<std::string> recorded(const MachineDescription& machine, const std::vector<Recorded>& calls) const {
    std::vector<std::string> files;
    for (const Recorded& call : calls) {
      const std::string name = fmt::format("{}.trace", files.size());
      files.push_back(record(machine, call, path(name), 7 + files.size()));
    }
    return files;
  }
  const test::TemporaryFolder folder_;
};

Calibrated fitted(const TimelineModel& timelines, const MachineDescription& base) {
  tune::Calibration calibration;
  calibration.device = timelines.calls().front().run.machine.device;
  calibration.compute_units = timelines.calls().front().run.machine.compute_units;
  const CalibrationModel none({}, base);
  return calibrated_machine(calibration, none, base, 0, &timelines);
}

const std::vector<Recorded> kCalls = {{},
                                      {.schedule = "fusion=none"},
                                      {.shape = {2048, 768, 16, 8}, .tokens = 2048},
                                      {.shape = {2048, 768, 32, 8}, .ranks = 2, .tokens = 2048},
                                      {.shape = {4096, 256, 32, 8}, .ranks = 2, .tokens = 1024},
                                      {.shape = {5120, 1536, 16, 8}, .tokens = 2048},
                                      {.schedule = "combine.transport=staged"},
                                      {.shape = {2048, 768, 32, 8}, .ranks = 2, .tokens = 1024}};

// Layers of other shapes, Schedules and sizes, of which only the time counts.
const std::vector<Recorded> kOthers = {
    {.shape = {7168, 2048, 16, 8}, .tokens = 1024},
    {.shape = {2880, 2880, 16, 4}, .tokens = 2048},
    {.schedule = "order.experts_per_wave=4,combine.column_chunks=2"},
    {.shape = {2048, 768, 16, 8}, .tokens = 1024, .schedule = "fusion=pairs"},
    {.shape = {4096, 1536, 32, 8}, .ranks = 2, .tokens = 2048},
    {.shape = {2048, 768, 64, 8}, .ranks = 2, .tokens = 4096, .schedule = "order.interleave=phased"}};

double error_of(const std::vector<Recorded>& calls, const MachineDescription& machine,
                const MachineDescription& truth) {
  double error = 0;
  for (const Recorded& call : calls) {
    const LayerOptions options = options_of(call);
    const Schedule schedule = options.resolved(call.direction, sim::schedule_machine(truth, call.ranks));
    const Program program(sim::simulated_request(call.shape, options.numerics, schedule, call.direction, truth),
                          place_ids(options, make_ids(options)).state());
    const double ms = sim::simulate(program, machine, {.state = call.state}).ms;
    error += std::abs(ms / sim::simulate(program, truth, {.state = call.state}).ms - 1);
  }
  return error / static_cast<double>(calls.size());
}

TEST_F(CalibrateTraces, FindsOtherMachinesAndPredictsOtherLayers) {
  const MachineDescription& base = sim::shipped_machine("h200");
  double all = 0;
  for (const uint64_t seed : {3, 4, 5}) {
    MachineDescription truth = other_machine(base, 2, seed);
    // What is before the first task and behind the last one is in no timeline.
    truth.time.begin = base.time.begin;
    truth.time.end = base.time.end;
    const TimelineModel timelines(read_timelines(recorded(truth, kCalls)), base);
    const Calibrated made = fitted(timelines, base);
    const TimelineErrors in = timeline_errors(timelines, made.fit, false),
                         out = timeline_errors(timelines, made.fit, true);
    const double before = error_of(kOthers, base, truth), after = error_of(kOthers, made.machine, truth);
    fmt::print(
        "8 timelines: held out end {:.2f} %, fitted ends {:.2f} %, numbers {:.2f} %; other layers: base {:.2f} "
        "%, fitted {:.2f} %; {} predictions\n",
        100 * out.calibrated_end, 100 * in.calibrated_end, 100 * in.calibrated_numbers, 100 * before, 100 * after,
        made.fit.predictions);
    EXPECT_EQ(out.calls, 1);
    EXPECT_EQ(in.calls, 7);
    EXPECT_LT(out.calibrated_end, 0.03);
    EXPECT_LT(in.calibrated_numbers, in.base_numbers / 3);
    EXPECT_GT(before, 0.05);
    EXPECT_LT(after, before / 3);
    all += after / 3;
    EXPECT_EQ(sim::parse_machine(sim::machine_json(made.machine), "machine"), made.machine);
    EXPECT_EQ(made.machine.origin.at("clock.limit").from, "uniep calibrate on Made-up GPU: fitted to 7 timelines");
    EXPECT_EQ(made.machine.calibrated->device, "Made-up GPU");
  }
  EXPECT_LT(all, 0.015);
}

// Copies that tiles hide, and sums beside tiles, are in no layer's time.
TEST_F(CalibrateTraces, TellsWhatLayersTimesDoNot) {
  const MachineDescription& base = sim::shipped_machine("h200");
  MachineDescription truth = base;
  truth.clock.limit *= 0.93;
  truth.copy.task *= 1.35;
  truth.sums.beside *= 0.75;
  truth.tiles.at(0).cycles *= 1.3;
  truth.time.launch *= 2.5;
  const std::vector<Recorded> calls = {{}, {.schedule = "fusion=none"}, {.shape = {2048, 768, 16, 8}, .tokens = 2048}};
  std::vector<TimelineCall> read = read_timelines(recorded(truth, calls));
  for (TimelineCall& call : read) call.held_out = false;
  const TimelineModel timelines(std::move(read), base);
  const tune::MachineFit by_traces = fitted(timelines, base).fit;

  tune::FitRequest request;
  request.base = &base;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    request.milliseconds.push_back({timelines.measured(i).numbers.front().us * 1e-3});
  }
  request.predict = [&](std::size_t i, const MachineDescription& machine) {
    return timelines.predicted(i, machine).front() * 1e-3;
  };
  const tune::MachineFit by_times = tune::fit_machine(request);
  for (const char* key : {"copy.task", "sums.beside", "time.launch"}) {
    MachineDescription there = truth, traced = by_traces.machine, timed = by_times.machine;
    const double right = tune::constant_of(there, key);
    const double error = std::abs(std::log(tune::constant_of(traced, key) / right));
    const double error_of_times = std::abs(std::log(tune::constant_of(timed, key) / right));
    fmt::print("{}: {:.1f} % off by timelines, {:.1f} % by times\n", key, 100 * error, 100 * error_of_times);
    EXPECT_LT(error, 0.15) << key;
    EXPECT_LT(error, error_of_times / 3) << key;
  }
}

TEST_F(CalibrateTraces, LeavesAMachineAloneThatIsAsDescribed) {
  const MachineDescription& base = sim::shipped_machine("h200");
  const TimelineModel timelines(read_timelines(recorded(base, {kCalls[0], kCalls[3]})), base);
  const Calibrated made = fitted(timelines, base);
  EXPECT_NEAR(made.machine.clock.limit / base.clock.limit, 1, 0.02);
  EXPECT_NEAR(made.machine.copy.task / base.copy.task, 1, 0.05);
  EXPECT_LT(error_of(kOthers, made.machine, base), 0.015);
  EXPECT_FALSE(made.fit.has_thirds);
  EXPECT_EQ(made.doubtful, std::vector<std::string>());
}

TEST_F(CalibrateTraces, BackwardSkewAndCopiesOnSmsAreFittedToo) {
  const MachineDescription& base = sim::shipped_machine("h200");
  MachineDescription truth = base;
  truth.clock.limit *= 0.92;
  truth.port.in *= 1.3;
  const TimelineModel timelines(
      read_timelines(recorded(truth, {{.direction = Direction::kBackward},
                                      {.shape = {2048, 768, 32, 8}, .ranks = 4, .routing = "zipf:0.5"},
                                      {.ranks = 2, .schedule = "comm.where=sms,comm.dispatch_sms=16"}})),
      base);
  const Calibrated made = fitted(timelines, base);
  const TimelineErrors fit = timeline_errors(timelines, made.fit, false),
                       out = timeline_errors(timelines, made.fit, true);
  EXPECT_GT(fit.base_end, 0.03);
  EXPECT_LT(fit.calibrated_end, 0.015);
  EXPECT_LT(out.calibrated_end, out.base_end);
  for (const TimelineNumber& number : timelines.measured(2).numbers) EXPECT_NE(number.name, "dispatch: a task");
}

// Rank 0 for all of many alike ranks. With 1024 tokens another rank may have a wave of tiles more.
TEST_F(CalibrateTraces, ManyRanks) {
  const MachineDescription& base = sim::shipped_machine("h200");
  const TimelineModel timelines(
      read_timelines(recorded(base, {{.shape = {2048, 768, 64, 8}, .ranks = 4, .tokens = 2048}})), base);
  const std::vector<double> predicted = timelines.predicted(0, base);
  const std::vector<TimelineNumber>& measured = timelines.measured(0).numbers;
  ASSERT_EQ(predicted.size(), measured.size());
  EXPECT_NEAR(predicted[0] / measured[0].us, 1, 0.04);
  const std::vector<tune::FittedConstant> constants = fitted(timelines, base).fit.constants;
  const auto is = [](const char* key) { return [key](const auto& one) { return one.constant.key == key; }; };
  EXPECT_EQ(base.links.front().rates.at(1).ranks, 4);
  EXPECT_EQ(std::count_if(constants.begin(), constants.end(), is("links[0].rates[1].read")), 1);
  EXPECT_EQ(std::count_if(constants.begin(), constants.end(), is("links[0].rates[0].read")), 0);
}

TEST_F(CalibrateTraces, FindsTheStateThatNobodySays) {
  const MachineDescription& base = sim::shipped_machine("h200");
  const TimelineModel timelines(
      read_timelines(recorded(base, {{.state = State::kPaused}, {}, {.state = State::kPaused, .says_state = true}})),
      base);
  EXPECT_FALSE(timelines.calls().front().run.state == std::nullopt);
  EXPECT_EQ(timelines.state(0), State::kPaused);
  EXPECT_EQ(timelines.state(1), State::kSustained);
  EXPECT_EQ(timelines.state(2), State::kPaused);
  const TracedRun said = read_timelines({path("2.trace")}).front().run;
  EXPECT_EQ(said.state, State::kPaused);
  EXPECT_EQ(read_timelines({path("1.trace")}).front().run.state, std::nullopt);
}

// One call of a slow machine is as long as another one's after a pause.
TEST_F(CalibrateTraces, FindsTheStatesOfASlowMachine) {
  const MachineDescription& base = sim::shipped_machine("h200");
  MachineDescription slow = base;
  slow.clock.limit *= 0.9;
  slow.clock.pause *= 0.9;
  slow.clock.pause_lowest *= 0.9;
  const std::vector<Recorded> calls = {{},
                                       {.state = State::kPaused},
                                       {.shape = {5120, 1536, 16, 8}, .tokens = 2048},
                                       {.shape = {5120, 1536, 16, 8}, .tokens = 2048, .state = State::kPaused},
                                       {.schedule = "fusion=none"}};
  const TimelineModel timelines(read_timelines(recorded(slow, calls)), base);
  for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(timelines.state(i), calls[i].state) << i;
}

TEST_F(CalibrateTraces, TheLastOfThreeFilesIsHeldOut) {
  const std::vector<Recorded> calls(3, {.shape = {512, 256, 16, 2}, .tokens = 256});
  const std::vector<std::string> files = recorded(sim::shipped_machine("h200"), calls);
  const std::vector<TimelineCall> three = read_timelines(files), two = read_timelines({files[0], files[1]});
  EXPECT_EQ((std::vector<bool>{three[0].held_out, three[1].held_out, three[2].held_out}),
            (std::vector<bool>{false, false, true}));
  EXPECT_FALSE(two[0].held_out || two[1].held_out);
}

// Both calls of a step are fitted.
TEST_F(CalibrateTraces, AFileMayHoldSeveralCalls) {
  const MachineDescription& base = sim::shipped_machine("h200");
  const std::vector<std::string> files =
      recorded(base, {{.tokens = 256}, {.tokens = 256, .direction = Direction::kBackward}});
  nlohmann::json first = nlohmann::json::parse(io::read_text_file(files[0]));
  const nlohmann::json second = nlohmann::json::parse(io::read_text_file(files[1]));
  for (nlohmann::json event : second.at("traceEvents")) {
    if (event.contains("ts")) event["ts"] = event["ts"].get<double>() + 5000;
    first["traceEvents"].push_back(event);
  }
  std::ofstream(path("both.trace")) << first.dump();
  const TimelineModel timelines(read_timelines({path("both.trace")}), base);
  ASSERT_EQ(timelines.calls().size(), 2u);
  EXPECT_EQ(timelines.calls()[1].run.direction, Direction::kBackward);
  EXPECT_NEAR(timelines.predicted(1, base)[0] / timelines.measured(1).of("end"), 1, 0.02);
}

TileEvent tile(int worker, bool copies, const char* stage, int64_t wait_us, int64_t begin_us, int64_t end_us) {
  return {0, worker, copies, stage, 0, 0, 0, 1000 * wait_us, 1000 * begin_us, 1000 * end_us};
}

// By hand: two workers' copies, tiles and sums.
const std::vector<TileEvent> kTiles = {tile(0, true, "dispatch", 0, 0, 10), tile(0, true, "dispatch", 12, 12, 20),
                                       tile(0, false, "fc1", 0, 21, 31),    tile(0, false, "fc1", 32, 32, 42),
                                       tile(0, false, "fc2", 42, 50, 60),   tile(0, true, "reduce", 50, 55, 58),
                                       tile(1, true, "dispatch", 0, 0, 8),  tile(1, false, "fc1", 0, 23, 33),
                                       tile(1, false, "fc1", 36, 38, 45),   tile(0, true, "reduce", 61, 61, 65)};

TEST(TimelineNumbers, AreThoseOfItsTiles) {
  const TracedCall call{"forward", kTiles, TracedLayer{{64, 32, 8, 2}, {}}};
  const Trace trace = parse_trace(trace_json("", std::span(&call, 1)), "memory");
  const TimelineNumbers numbers = timeline_numbers(timeline_of(trace, 0), {.launches = 2});
  EXPECT_EQ(numbers.numbers.front().name, "end");
  EXPECT_EQ(numbers.ranks, 1);
  EXPECT_EQ(numbers.tiles, (std::map<std::string, int64_t>{{"dispatch", 3}, {"fc1", 4}, {"fc2", 1}, {"reduce", 2}}));
  const std::map<std::string, double> expected = {{"end", 65},
                                                  {"first GEMM tile", 21},
                                                  {"dispatch: a task", (12 + 8 + 8) / 3.0},  // until the next one
                                                  {"dispatch: end", 20},
                                                  {"fc1: a tile", (11 + 10 + 13 + 7) / 4.0},
                                                  {"fc1: end", 45},
                                                  {"fc2: a tile", 10},
                                                  {"fc2: end", 60},
                                                  {"a sum beside tiles", 3},
                                                  {"behind the last GEMM tile", 5},
                                                  {"between launches", 2 + 1 + 5 + 1},
                                                  {"waits of a worker", (21 + 8 + 23 + 2) / 2.0}};
  EXPECT_EQ(numbers.numbers.size(), expected.size());
  for (const auto& [name, us] : expected) EXPECT_NEAR(numbers.of(name), us, 1e-6) << name;
  for (const TimelineNumber& number : numbers.numbers)
    EXPECT_TRUE(number.error >= 0.03 && number.error < 1) << number.name;
}

// Until all ranks have come nothing runs, and how long that takes is no constant.
TEST(TimelineNumbers, BeginWithTheFirstTask) {
  std::vector<TileEvent> later = kTiles;
  for (TileEvent& event : later) {
    if (event.wait_begin_ns > 0) event.wait_begin_ns += 30000;
    event.begin_ns += 30000;
    event.end_ns += 30000;
  }
  const auto numbers_of = [](const std::vector<TileEvent>& events) {
    const TracedCall call{"forward", events, TracedLayer{{64, 32, 8, 2}, {}}};
    return timeline_numbers(timeline_of(parse_trace(trace_json("", std::span(&call, 1)), "memory"), 0),
                            {.launches = 2});
  };
  const TimelineNumbers as_is = numbers_of(kTiles), there = numbers_of(later);
  ASSERT_EQ(there.numbers.size(), as_is.numbers.size());
  for (const TimelineNumber& number : as_is.numbers) EXPECT_NEAR(there.of(number.name), number.us, 1e-6) << number.name;
}

// Clocks of two GPUs are brought together at the end of their calls, however much earlier one has no more to do.
TEST(TimelineNumbers, AreTheSameWithClocksApart) {
  const std::vector<TimelineTask> tasks = {{0, 0, true, 0, 0, 0, 40},
                                           {0, 0, false, 1, 5, 20, 90},
                                           {1, 0, true, 0, 2, 3, 50},
                                           {1, 0, false, 1, 4, 30, 60},
                                           {1, 0, false, 1, 60, 61, 70}};
  Timeline together{{"dispatch", "fc1"}, tasks, 2}, apart = together;
  for (TimelineTask& task : apart.tasks) {
    if (task.rank == 0) continue;
    for (double* time : {&task.wait_begin, &task.begin, &task.end}) *time += 1000;
  }
  const TimelineNumbers one = timeline_numbers(together, {}), other = timeline_numbers(apart, {});
  ASSERT_EQ(one.numbers.size(), other.numbers.size());
  EXPECT_GT(one.numbers.size(), 5u);
  for (std::size_t i = 0; i < one.numbers.size(); ++i) {
    EXPECT_EQ(one.numbers[i].name, other.numbers[i].name);
    EXPECT_DOUBLE_EQ(one.numbers[i].us, other.numbers[i].us) << one.numbers[i].name;
  }
  EXPECT_EQ(one.of("end"), 90);
}

TEST(TimelineNumbers, CopiesOnSmsAndOneLaunchSayLess) {
  const TracedCall call{"forward", kTiles, TracedLayer{{64, 32, 8, 2}, {}}};
  const Trace trace = parse_trace(trace_json("", std::span(&call, 1)), "memory");
  const TimelineNumbers numbers = timeline_numbers(timeline_of(trace, 0), {.copies_on_sms = true});
  EXPECT_EQ(numbers.of("dispatch: a task"), 0);
  EXPECT_EQ(numbers.of("dispatch: end"), 20);
  EXPECT_EQ(numbers.of("between launches"), 0);
}

// A number counts by its own error, beside a layer's.
TEST(FitTimelines, ANumberCountsByItsError) {
  const MachineDescription& base = sim::shipped_machine("h200");
  const auto limit_by = [&](double error, double layer_error_times) {
    tune::FitRequest request;
    request.base = &base;
    request.layer_error = 0.01;
    request.predict = [](std::size_t, const MachineDescription& machine) { return 1 / machine.clock.limit; };
    request.predict_timeline = [](std::size_t, const MachineDescription& machine) {
      return std::vector<double>{100, 1e3 / machine.clock.limit};
    };
    request.milliseconds = {{1 / base.clock.limit}};
    request.timelines = {{{100, 0.01}, {1e3 / base.clock.limit * std::exp(layer_error_times), error}}};
    const tune::MachineFit fit = tune::fit_machine(request);
    EXPECT_EQ(fit.timelines.size(), 1u);
    EXPECT_EQ(fit.timelines.front().size(), 2u);
    EXPECT_NEAR(fit.timelines[0][1], 1e3 / fit.machine.clock.limit, 1e-9);
    return -std::log(fit.machine.clock.limit / base.clock.limit);
  };
  EXPECT_NEAR(limit_by(0.01, 0.02), 0.01, 0.0005);   // halfway
  EXPECT_NEAR(limit_by(0.03, 0.02), 0.002, 0.0003);  // a ninth of a layer's weight
}

TEST(FitTimelines, RefusesNumbersThatAreMissing) {
  tune::FitRequest request;
  const MachineDescription& base = sim::shipped_machine("h200");
  request.base = &base;
  request.timelines = {{{100, 0.01}, {10, 0.1}}};
  request.predict_timeline = [](std::size_t, const MachineDescription&) { return std::vector<double>{100}; };
  test::expect_error(Status::kInternal, "timeline 0 has 2 numbers, and 1 are predicted",
                     [&] { tune::fit_machine(request); });
}

}  // namespace
}  // namespace uniep::cli
