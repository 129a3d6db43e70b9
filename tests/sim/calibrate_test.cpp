#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <map>
#include <random>

#include "cli/calibrate_report.h"
#include "io/file.h"
#include "support/expect_error.h"
#include "support/measured_layers.h"
#include "support/other_machine.h"
#include "support/processes.h"
#include "tune/median.h"

// The fit of a machine description, without a GPU: on times that the simulator made up for a machine whose constants
// are others, and on layers that were measured.
namespace uniep::cli {
namespace {

using sim::MachineDescription;
using test::other_machine;

// Layers of the fixed set at a quarter of their tokens, so that the test is quick.
std::vector<tune::CalibrationLayer> short_layers(int ranks) {
  std::vector<tune::CalibrationLayer> layers = tune::calibration_layers(ranks);
  for (tune::CalibrationLayer& layer : layers) {
    if (layer.tokens > 1024) layer.tokens /= 4;
  }
  return layers;
}

// What that machine would measure: nine calls with half a percent of noise.
tune::Calibration made_up(const MachineDescription& machine, int ranks) {
  tune::Calibration calibration{"Made-up GPU", 132, {}, {}};
  const CalibrationModel model(short_layers(ranks), machine);
  EXPECT_EQ(model.dropped(), std::vector<std::string>());
  std::mt19937_64 random(5);
  const std::vector<double> all = model.milliseconds_in_turn(machine);
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    calibration.layers.push_back(model.layers()[i]);
    const double ms = all[i];
    for (int call = 0; call < 9; ++call) {
      const double noise = static_cast<double>(random() >> 11) * 0x1p-53 * 2 - 1;
      calibration.layers.back().milliseconds.push_back(ms * (1 + 0.005 * noise));
    }
  }
  return calibration;
}

TEST(Calibrate, FindsOtherMachinesAndPredictsWhatWasHeldOut) {
  const std::map<int, std::vector<uint64_t>> seeds = {{1, {3, 6}}, {2, {4}}};  // by ranks
  for (const auto& [ranks, of_ranks] : seeds) {
    double error = 0;
    for (const uint64_t seed : of_ranks) {
      const MachineDescription& base = sim::shipped_machine("h200");
      const tune::Calibration calibration = made_up(other_machine(base, ranks, seed), ranks);
      const CalibrationModel model(calibration.layers, base);
      const Calibrated made = calibrated_machine(calibration, model, base);
      const CalibrateErrors errors = calibrate_errors(model, made.fit, true);
      fmt::print("{} ranks: held out {} layers: base {:.2f} %, fitted {:.2f} %; {} predictions\n", ranks, errors.layers,
                 100 * errors.base, 100 * errors.calibrated, made.fit.predictions);
      EXPECT_GE(errors.layers, 10);
      EXPECT_GT(errors.base, 0.05);
      EXPECT_LT(errors.calibrated, errors.base / 3);
      EXPECT_EQ(made.doubtful, std::vector<std::string>());
      EXPECT_EQ(sim::parse_machine(sim::machine_json(made.machine), "machine"), made.machine);
      EXPECT_EQ(made.machine.origin.at("clock.limit").source, sim::Source::kMeasured);
      EXPECT_TRUE(made.machine.origin.at("memory.capacity").from.starts_with("taken over from h200: "));
      error += errors.calibrated / static_cast<double>(of_ranks.size());
    }
    EXPECT_LT(error, 0.015);
  }
}

TEST(Calibrate, IsTheSameEachTimeAndOnAnyNumberOfThreads) {
  const MachineDescription& base = sim::shipped_machine("dgx_h100");
  tune::Calibration calibration = made_up(other_machine(base, 1, 4), 1);
  calibration.layers.resize(9);
  const CalibrationModel model(calibration.layers, base);
  const Calibrated one = calibrated_machine(calibration, model, base, 1);
  const Calibrated three = calibrated_machine(calibration, model, base, 3);
  EXPECT_EQ(one.machine, three.machine);
  EXPECT_EQ(one.fit.predicted, three.fit.predicted);
}

TEST(Calibrate, LeavesAMachineAloneThatIsAsDescribed) {
  const MachineDescription& base = sim::shipped_machine("h200");
  tune::Calibration calibration = made_up(base, 1);
  const CalibrationModel model(calibration.layers, base);
  const Calibrated made = calibrated_machine(calibration, model, base);
  EXPECT_NEAR(made.machine.clock.limit / base.clock.limit, 1, 0.02);
  EXPECT_LT(calibrate_errors(model, made.fit, true).calibrated, 0.01);
}

// The mean error of a machine on what layers take on another one.
double error_beside(const CalibrationModel& model, const MachineDescription& machine, const MachineDescription& truth) {
  double error = 0;
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    error += std::abs(model.milliseconds(i, machine) / model.milliseconds(i, truth) - 1);
  }
  return error / static_cast<double>(model.layers().size());
}

// Each turn runs at a clock of its own, and each layer has an error that no constant explains, as on GPUs: neither
// moves what is known of GPUs of this kind, but the clock that all turns have in common is found.
TEST(Calibrate, OfAKnownKindOnlyClocksAreFarFromTheBase) {
  const MachineDescription& base = sim::shipped_machine("h200");
  MachineDescription truth = base;
  truth.clock.limit *= 0.93;
  tune::Calibration calibration{"NVIDIA H200", 132, {}, {}};
  for (const tune::CalibrationLayer& layer : short_layers(1)) {
    if (layer.direction == Direction::kForward && layer.state == sim::State::kSustained) {
      calibration.layers.push_back(layer);
    }
  }
  const CalibrationModel plan(calibration.layers, truth);
  const std::vector<double> times = plan.milliseconds_in_turn(truth);
  constexpr double kOfTurn = 0.05, kOfLayer = 0.05;  // the greatest
  std::mt19937_64 random(3);
  const auto draw = [&](double most) { return std::exp(most * (static_cast<double>(random() >> 11) * 0x1p-52 - 1)); };
  std::vector<double> of_turn;
  while (of_turn.size() <= plan.turns().back()) of_turn.push_back(draw(kOfTurn));
  EXPECT_GE(of_turn.size(), 8u);
  for (std::size_t i = 0; i < times.size(); ++i) {
    calibration.layers[i].milliseconds.assign(9, times[i] * of_turn[plan.turns()[i]] * draw(kOfLayer));
  }
  const CalibrationModel model(calibration.layers, base);
  const Calibrated known = calibrated_machine(calibration, model, base);
  calibration.device = "NVIDIA H200 NVL";
  const Calibrated other = calibrated_machine(calibration, model, base);
  const double as_base = error_beside(model, base, truth), error = error_beside(model, known.machine, truth),
               of_other = error_beside(model, other.machine, truth);
  fmt::print("{} turns, {} layers: base {:.2f} %, of this kind {:.2f} %, of another {:.2f} %; limit {:.3f}, {:.3f}\n",
             of_turn.size(), times.size(), 100 * as_base, 100 * error, 100 * of_other,
             known.machine.clock.limit / truth.clock.limit, other.machine.clock.limit / truth.clock.limit);
  EXPECT_GT(as_base, 0.04);
  EXPECT_LT(error, 0.015);
  EXPECT_LT(error, of_other);
}

// A turn of many layers at a clock of its own bends the constants, unless the fit knows which layers took turns.
TEST(Calibrate, ATurnsClockIsNotTheMachines) {
  const MachineDescription& truth = sim::shipped_machine("h200");
  std::vector<tune::CalibrationLayer> layers;
  for (const tune::CalibrationLayer& layer : short_layers(1)) {
    if (layer.direction == Direction::kForward && layer.state == sim::State::kSustained) layers.push_back(layer);
  }
  const CalibrationModel plan(layers, truth);
  const std::vector<double> times = plan.milliseconds_in_turn(truth);
  int slower = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool first = plan.turns()[i] == 0;
    slower += first && !layers[i].held_out;
    layers[i].milliseconds.assign(9, first ? 1.03 * times[i] : times[i]);
  }
  EXPECT_GE(slower, 15);
  const CalibrationModel model(layers, truth);
  tune::FitRequest request;
  request.base = &truth;
  for (const tune::CalibrationLayer& layer : model.layers()) {
    request.milliseconds.push_back(layer.milliseconds);
    request.held_out.push_back(layer.held_out);
  }
  request.predict = [&](std::size_t i, const MachineDescription& machine) { return model.milliseconds(i, machine); };
  request.follows = [&](std::size_t i, std::string_view key) { return model.follows(i, key); };
  const double without = error_beside(model, tune::fit_machine(request).machine, truth),
               with = error_beside(model, model.fit(truth, false, 0, nullptr).machine, truth);
  fmt::print("{} layers of one turn 3 % slower: {:.2f} % off, turns unknown {:.2f} %\n", slower, 100 * with,
             100 * without);
  EXPECT_LT(with, 0.01);
  EXPECT_LT(1.5 * with, without);
}

TEST(Calibrate, DoubtsCallsThatDisagree) {
  const MachineDescription& base = sim::shipped_machine("h200");
  tune::Calibration calibration = made_up(base, 1);
  for (tune::CalibrationLayer& layer : calibration.layers) {
    for (std::size_t call = 6; call < layer.milliseconds.size(); ++call) layer.milliseconds[call] *= 1.5;
  }
  const CalibrationModel model(calibration.layers, base);
  const Calibrated made = calibrated_machine(calibration, model, base);
  EXPECT_FALSE(made.doubtful.empty());
  ASSERT_TRUE(made.machine.calibrated);
  EXPECT_EQ(made.machine.calibrated->doubtful, made.doubtful);
}

// Something else ran on the GPU in one third of a turn, and in another third of the next one: no constant follows from
// that, but the clocks of the turns do.
TEST(Calibrate, DoubtsTurnsThatDisagreeEachInAnotherThird) {
  const MachineDescription& base = sim::shipped_machine("h200");
  tune::Calibration calibration{"NVIDIA H200", 132, {}, {}};
  for (int turn = 0; turn < 9; ++turn) {
    for (const char* schedule : {"auto", "queue=static", "order.raster=4"}) {
      tune::CalibrationLayer layer;
      layer.shape = {4096, 1536, 16, 8};
      layer.tokens = 2048 + 32 * turn;
      layer.schedule = schedule;
      calibration.layers.push_back(layer);
    }
  }
  const CalibrationModel plan(calibration.layers, base);
  EXPECT_EQ(plan.turns().back(), 8u);
  const std::vector<double> times = plan.milliseconds_in_turn(base);
  for (std::size_t i = 0; i < times.size(); ++i) {
    std::vector<double>& calls = calibration.layers[i].milliseconds;
    calls.assign(9, times[i]);
    const std::size_t third = plan.turns()[i] % 3;
    for (std::size_t call = 3 * third; call < 3 * third + 3; ++call) calls[call] *= 1.5;
  }
  const CalibrationModel model(calibration.layers, base);
  const Calibrated made = calibrated_machine(calibration, model, base);
  fmt::print("thirds are {:.0f} % apart\n", 100 * made.fit.disagreement);
  EXPECT_GT(made.fit.disagreement, kMostSpread);
  for (const tune::FittedConstant& constant : made.fit.constants) {
    EXPECT_LT(constant.spread, kMostSpread) << constant.constant.key;
  }
  EXPECT_EQ(made.doubtful, std::vector<std::string>{kClocksOfTurns});
  ASSERT_TRUE(made.machine.calibrated);
  EXPECT_EQ(made.machine.calibrated->doubtful, made.doubtful);
}

// Layers that take turns have one power limit: what leaves tensor cores idle lets its neighbours run faster.
TEST(Calibrate, LayersThatTakeTurnsShareAPowerLimit) {
  const MachineDescription& base = sim::shipped_machine("h200");
  std::vector<tune::CalibrationLayer> layers(2);
  for (tune::CalibrationLayer& layer : layers) {
    layer.shape = {4096, 1536, 16, 8};
    layer.tokens = 2048;
  }
  layers[1].schedule = "comm.reserve_sms=100";
  const auto times = [&] { return CalibrationModel(layers, base).milliseconds_in_turn(base); };
  const std::vector<double> turns = times();
  for (const std::size_t i : {0u, 1u}) layers[i].milliseconds.assign(3, turns[i]);
  const CalibrationModel measured(layers, base);
  EXPECT_NEAR(measured.milliseconds(0, base) / turns[0], 1, 0.005);
  EXPECT_NEAR(measured.milliseconds(1, base) / turns[1], 1, 0.005);
  // A layer of other tokens has a session of its own.
  layers[1].tokens = 1024;
  const std::vector<double> apart = times();
  EXPECT_LT(turns[0], 0.97 * apart[0]);
  layers[1] = layers[0];
  EXPECT_NEAR(times()[0] / apart[0], 1, 0.005);
  for (tune::CalibrationLayer& layer : layers) layer.state = sim::State::kPaused;
  layers[1].schedule = "comm.reserve_sms=100";
  const double paused = times()[0];
  layers[1].tokens = 1024;
  EXPECT_EQ(times()[0], paused);
}

// What follows() says can not matter does not.
TEST(Calibrate, LayersFollowOnlyWhatTheyAreSaidTo) {
  const MachineDescription& base = sim::shipped_machine("h200");
  const CalibrationModel model(short_layers(2), base);
  int without = 0;
  std::vector<double> as_is;
  for (std::size_t i = 0; i < model.layers().size(); ++i) as_is.push_back(model.milliseconds(i, base));
  for (const tune::FitConstant& constant : tune::fit_constants(base, 2)) {
    MachineDescription other = base;
    double& value = tune::constant_of(other, constant.key);
    value = constant.share ? value + 0.05 : value * 1.1;
    for (std::size_t i = 0; i < model.layers().size(); ++i) {
      if (model.follows(i, constant.key)) continue;
      ++without;
      EXPECT_EQ(model.milliseconds(i, other), as_is[i]) << constant.key << ", " << tune::layer_name(model.layers()[i]);
    }
  }
  EXPECT_GT(without, 300);
}

// Some sessions of recorded layers give constants that predict the other ones, from a base that is off.
struct RecordedSessions {
  int ranks;
  std::vector<const char*> fitted;  // how sessions begin
  int every;                        // of their layers: all of two GPUs take minutes
  double error;                     // of the others, at most
};

void refit(const RecordedSessions& wanted) {
  std::vector<test::MeasuredLayer> layers;
  tune::FitRequest request;
  int seen = 0;  // of the sessions that are fitted
  for (test::MeasuredLayer& layer :
       test::read_measured_layers(std::string(UNIEP_TEST_DATA) + "/measured_layers.json")) {
    const bool all = layer.machine == "h200" && layer.ranks == wanted.ranks;
    if (!all || layer.direction != Direction::kForward) continue;
    const auto same = std::find_if(layers.begin(), layers.end(), [&](const test::MeasuredLayer& one) {
      return one.session == layer.session && one.shape == layer.shape && one.schedule == layer.schedule &&
             one.tokens == layer.tokens && one.routing == layer.routing && one.ascending_sums == layer.ascending_sums;
    });
    const auto at = static_cast<std::size_t>(same - layers.begin());
    if (at == layers.size()) {
      const bool fitted = std::any_of(wanted.fitted.begin(), wanted.fitted.end(),
                                      [&](const char* begin) { return layer.session.starts_with(begin); });
      if (fitted && seen++ % wanted.every != 0) continue;
      layers.push_back(layer);
      request.milliseconds.emplace_back();
      request.held_out.push_back(!fitted);
    }
    request.milliseconds[at].push_back(layer.ms);
  }
  const MachineDescription& shipped = sim::shipped_machine("h200");
  MachineDescription base = shipped;
  base.clock.limit *= 0.9;
  base.clock.pause *= 0.93;
  base.clock.pause_lowest *= 0.93;
  base.tiles.at(0).cycles *= 1.2;
  base.sums.beside *= 1.3;
  base.copy.chunk_in *= 0.7;
  base.links.at(0).rates.at(0).both *= 0.8;
  test::LayerPredictor predictor;
  request.base = &base;
  request.ranks = wanted.ranks;
  request.layer_error = tune::kOtherRunError;
  predictor.add_to(request, layers);
  const tune::MachineFit fit = tune::fit_machine(request);
  double as_shipped = 0, before = 0, after = 0;
  int count = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!request.held_out[i]) continue;
    const double ms = tune::median(request.milliseconds[i]);
    as_shipped += std::abs(predictor.predict(layers[i], shipped).simulated / ms - 1);
    before += std::abs(fit.base_predicted[i] / ms - 1);
    after += std::abs(fit.predicted[i] / ms - 1);
    ++count;
  }
  fmt::print(
      "{} GPUs, {} of {} layers of other sessions: base {:.2f} %, fitted {:.2f} %, as shipped {:.2f} %; {} "
      "predictions\n",
      wanted.ranks, count, layers.size(), 100 * before / count, 100 * after / count, 100 * as_shipped / count,
      fit.predictions);
  ASSERT_GE(count, 8);
  EXPECT_GT(before / count, 0.05);
  EXPECT_LT(after / count, wanted.error);
}

TEST(Calibrate, RefitsFromASessionOfLayersOfOneGpu) {
  refit({1, {"J1 mixed queues", "F4 push1", "F4 I "}, 1, 0.035});
}

TEST(Calibrate, RefitsFromASessionOfLayersOfTwoGpus) {
  refit({2, {"K2 "}, 2, 0.045});
}

// What one and two H200 have measured, fitted from another kind of GPU, predicts what eight have. Links of eight are as
// described.
TEST(Calibrate, EightGpusFollowFromOneAndTwo) {
  int seen = 0;
  std::vector<test::MeasuredLayer> layers;
  tune::FitRequest request;
  for (test::MeasuredLayer& layer :
       test::read_measured_layers(std::string(UNIEP_TEST_DATA) + "/measured_layers.json")) {
    if (layer.machine != "h200" || layer.ranks == 4 || layer.direction != Direction::kForward) continue;
    constexpr int kEvery = 8;  // of one and two: all of them take minutes
    if (layer.ranks < 8 && seen++ % kEvery != 0) continue;
    request.milliseconds.push_back({layer.ms});
    request.held_out.push_back(layer.ranks == 8);
    layers.push_back(std::move(layer));
  }
  const MachineDescription& base = sim::shipped_machine("dgx_h100");
  test::LayerPredictor predictor;
  request.base = &base;
  request.ranks = 2;
  request.layer_error = tune::kOtherRunError;
  predictor.add_to(request, layers);
  const tune::MachineFit fit = tune::fit_machine(request);
  double before = 0, after = 0;
  int count = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!request.held_out[i]) continue;
    before += std::abs(fit.base_predicted[i] / layers[i].ms - 1);
    after += std::abs(fit.predicted[i] / layers[i].ms - 1);
    ++count;
  }
  fmt::print("eight GPUs, {} layers: as another kind {:.2f} %, fitted to {} of one and two {:.2f} %\n", count,
             100 * before / count, layers.size() - static_cast<std::size_t>(count), 100 * after / count);
  ASSERT_GE(count, 20);
  EXPECT_LT(after / count, 0.04);
}

// What `uniep calibrate --raw` wrote, and the error that held out layers may have at most.
void predict_measured(const std::string& shipped, const std::string& name, double most) {
  const std::string file = std::string(UNIEP_TEST_DATA) + "/" + name;
  const tune::Calibration calibration = tune::parse_calibration(io::read_text_file(file), file);
  const MachineDescription base = base_for(sim::shipped_machine(shipped), calibration);
  const CalibrationModel model(calibration.layers, base);
  EXPECT_EQ(model.dropped(), std::vector<std::string>());
  const Calibrated made = calibrated_machine(calibration, model, base);
  const CalibrateErrors errors = calibrate_errors(model, made.fit, true);
  fmt::print("held out {} layers: base {:.2f} %, fitted {:.2f} %; thirds of the calls are {:.1f} % apart\n",
             errors.layers, 100 * errors.base, 100 * errors.calibrated, 100 * made.fit.disagreement);
  EXPECT_GE(errors.layers, 15);
  EXPECT_LT(errors.calibrated, most);
  EXPECT_GT(errors.base, errors.calibrated);
  EXPECT_GT(made.fit.disagreement, 0.01);  // a GPU at its power limit
  EXPECT_EQ(made.doubtful, std::vector<std::string>());
}

TEST(Calibrate, PredictsWhatAnH200Measured) {
  predict_measured("dgx_h100", "calibrated_h200.json", 0.018);
}

TEST(Calibrate, PredictsWhatTwoH200Measured) {
  predict_measured("dgx_h100", "calibrated_two_h200.json", 0.035);
}

TEST(Calibrate, PredictsWhatAnH100Measured) {
  predict_measured("dgx_h100", "calibrated_h100.json", 0.018);
}

// Limits hold for users other than root, and count all of a user's processes: as root, those of one that has no others,
// so that `made` threads can be made; else none can.
TEST(Calibrate, FitsOnTheThreadsThatThereAre) {
  constexpr uid_t kNobodyElse = 54323;  // a user without processes
  const bool root = ::geteuid() == 0;
  tune::FitRequest request;
  request.base = &sim::shipped_machine("h200");
  request.milliseconds.assign(4, {1, 1, 1});
  request.threads = 4;
  request.predict = [](std::size_t, const MachineDescription& machine) { return 1.2 / machine.clock.limit; };
  const double limit = tune::fit_machine(request).machine.clock.limit;
  for (int made = 0; made < (root ? 2 : 1); ++made) {
    test::Process child([&](const test::Reporter& reporter) {
      if (root && ::setresuid(kNobodyElse, kNobodyElse, kNobodyElse) != 0) return reporter.line("no other user");
      rlimit threads{};
      ::getrlimit(RLIMIT_NPROC, &threads);
      threads.rlim_cur = static_cast<rlim_t>(1 + made);
      ::setrlimit(RLIMIT_NPROC, &threads);
      reporter.line(tune::fit_machine(request).machine.clock.limit == limit ? "the same" : "another");
    });
    EXPECT_EQ(child.line(), "the same") << made << " more threads";
  }
}

TEST(Calibrate, NothingToFitIsRefused) {
  tune::FitRequest request;
  const MachineDescription& base = sim::shipped_machine("h200");
  request.base = &base;
  test::expect_error(Status::kInvalidArgument, "calibration: no layers", [&] { tune::fit_machine(request); });
}

}  // namespace
}  // namespace uniep::cli
