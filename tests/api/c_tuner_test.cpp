#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "support/c_layer.h"
#include "support/temporary_folder.h"
#include "tune/tuned.h"
#include "uniep/c_api.h"
#include "uniep/libraries.h"

// The tuner through the C API, with made-up times: what it decides is the C++ API's (tuner_test).
namespace uniep::test {
namespace {

using TunerHandle = std::unique_ptr<uniep_tuner, Destroyer<uniep_tuner_destroy>>;

// A job whose first candidate is faster than everything else, and whose third fails.
struct Job {
  std::vector<std::string> checked;
  std::vector<std::string> log;
  std::vector<std::byte> given;
  uniep_status exchange = UNIEP_OK;

  static uniep_status check(void* context, int32_t layer, int32_t direction, const char* candidate,
                            const char* incumbent, uniep_tuner_check* result) {
    Job& job = *static_cast<Job*>(context);
    EXPECT_EQ(layer, 0);
    EXPECT_EQ(direction, UNIEP_FORWARD);
    EXPECT_STRNE(candidate, incumbent);
    job.checked.emplace_back(candidate);
    result->milliseconds = 0.001;
    result->equal = job.checked.size() != 2;
    if (job.checked.size() != 3) return UNIEP_OK;
    result->refused = "planted";
    return UNIEP_DEVICE;
  }
  static uniep_status give(void* context, int64_t, const void* bytes, size_t size) {
    Job& job = *static_cast<Job*>(context);
    const auto* const first = static_cast<const std::byte*>(bytes);
    job.given.assign(first, first + size);
    return UNIEP_OK;
  }
  static uniep_status take(void* context, int64_t, void* sink, void (*put)(void* sink, const void* bytes, size_t)) {
    Job& job = *static_cast<Job*>(context);
    if (job.exchange != UNIEP_OK) return job.exchange;
    for (int rank = 0; rank < 2; ++rank) put(sink, job.given.data(), job.given.size());
    return UNIEP_OK;
  }
  static void line(void* context, const char* line) { static_cast<Job*>(context)->log.emplace_back(line); }

  bool is_fast(const char* schedule) const { return !checked.empty() && schedule == checked.front(); }
};

class CTuner : public testing::Test {
 protected:
  CTuner() : random_(random_layer(3, {.ranks = {2}})), layer_(random_), group_(make_group(group_options(2))) {
    tuned_.size = sizeof(tuned_);
    tuned_.config = &layer_.config;
    tuned_.tokens = 64;
    options_.size = sizeof(options_);
    options_.layers = &tuned_;
    options_.layer_count = 1;
    options_.context = &job_;
    options_.check = Job::check;
    options_.log = Job::line;
    options_.budget = 1;
  }

  TunerHandle make() {
    uniep_tuner* tuner = nullptr;
    expect_ok(uniep_tuner_create(group_.get(), &options_, &tuner));
    return TunerHandle(tuner);
  }
  uniep_status refused() {
    uniep_tuner* tuner = nullptr;
    const uniep_status status = uniep_tuner_create(group_.get(), &options_, &tuner);
    EXPECT_EQ(tuner, nullptr);
    return status;
  }
  uniep_tuner_state state(uniep_tuner* tuner) {
    uniep_tuner_state state{};
    state.size = sizeof(state);
    expect_ok(uniep_tuner_describe(tuner, &state));
    return state;
  }
  void step(uniep_tuner* tuner) {
    if (state(tuner).wants_round != 0) expect_ok(uniep_tuner_begin_round(tuner));
    for (int i = 0; i < 20; ++i) {
      uniep_tuner_call call{};
      call.size = sizeof(call);
      expect_ok(uniep_tuner_schedule(tuner, 0, UNIEP_FORWARD, &call));
      EXPECT_EQ(call.number, calls_++);
      if (call.timed == 0) continue;  // nobody waits for its time
      ++timed_;
      expect_ok(uniep_tuner_measured(tuner, &call, job_.is_fast(call.schedule) ? 0.8 : 1.0, 0, 0));
    }
    expect_ok(uniep_tuner_step(tuner));
  }

  RandomLayer random_;
  CLayer layer_;
  GroupHandle group_;
  Job job_;
  uniep_tuner_layer tuned_{};
  uniep_tuner_options options_{};
  uint64_t calls_ = 0, timed_ = 0;
};

// Of a call that has no time there is no fault, and of one whose time nobody waits for there may be.
TEST_F(CTuner, CallsThatFailOrAreNotMeasured) {
  TemporaryFolder folder;
  const std::string place = folder.path();
  options_.folder = place.c_str();
  options_.machine_name = "made up";
  const TunerHandle tuner = make();
  int lost = 0;
  const auto run = [&](const auto& reported) {
    if (state(tuner.get()).wants_round != 0) expect_ok(uniep_tuner_begin_round(tuner.get()));
    for (int i = 0; i < 20; ++i) {
      uniep_tuner_call call{};
      call.size = sizeof(call);
      expect_ok(uniep_tuner_schedule(tuner.get(), 0, UNIEP_FORWARD, &call));
      if (reported(call) || call.timed == 0) continue;
      expect_ok(uniep_tuner_measured(tuner.get(), &call, job_.is_fast(call.schedule) ? 0.8 : 1.0, 0, 0));
    }
    expect_ok(uniep_tuner_step(tuner.get()));
  };
  const auto incumbent = [&] {
    const char* found = nullptr;
    expect_ok(uniep_tuner_incumbent(tuner.get(), 0, UNIEP_FORWARD, &found));
    return std::string(found);
  };
  const std::string given = incumbent();
  for (int step = 0; step < 40; ++step) {
    run([&](const uniep_tuner_call& call) {
      if (lost > 2 || !job_.is_fast(call.schedule)) return false;
      expect_ok(uniep_tuner_not_measured(tuner.get(), &call));
      return ++lost > 0;
    });
  }
  EXPECT_EQ(lost, 3);
  ASSERT_EQ(incumbent(), job_.checked.front());
  bool failed = false;
  for (int step = 0; step < 2; ++step) {
    run([&](const uniep_tuner_call& call) {
      if (failed || call.timed != 0) return false;
      expect_ok(uniep_tuner_failed(tuner.get(), &call, "planted"));
      return failed = true;
    });
  }
  EXPECT_TRUE(failed);
  EXPECT_EQ(incumbent(), given);
}

TEST_F(CTuner, TakesWhatIsFasterAndLeavesOutWhatIsFaulty) {
  const TunerHandle tuner = make();
  for (int i = 0; i < 40; ++i) step(tuner.get());
  ASSERT_GT(job_.checked.size(), 3u);
  const char* incumbent = nullptr;
  expect_ok(uniep_tuner_incumbent(tuner.get(), 0, UNIEP_FORWARD, &incumbent));
  EXPECT_EQ(incumbent, job_.checked.front());
  const char* kept = nullptr;
  expect_ok(uniep_tuner_schedule_to_keep(tuner.get(), 0, UNIEP_FORWARD, &kept));
  EXPECT_STREQ(kept, incumbent);

  const uniep_tuner_state now = state(tuner.get());
  EXPECT_EQ(now.steps, 40);
  EXPECT_GT(now.tried_calls, 32);
  EXPECT_GT(now.layers_milliseconds, 500);
  ASSERT_GT(now.decisions, 2);
  int taken = 0, wrong = 0, failed = 0;
  for (int32_t i = 0; i < now.decisions; ++i) {
    uniep_tuner_decision decision{};
    decision.size = sizeof(decision);
    expect_ok(uniep_tuner_get_decision(tuner.get(), i, &decision));
    const std::string verdict = decision.verdict;
    if (verdict == "taken") {
      ++taken;
      EXPECT_EQ(decision.schedule, job_.checked.front());
      EXPECT_NEAR(decision.ratio, 0.8, 1e-3);
      EXPECT_GE(decision.pairs, 32);
    } else if (verdict == "wrong") {
      ++wrong;
      EXPECT_EQ(decision.schedule, job_.checked[1]);
    } else if (verdict == "failed") {
      ++failed;
      EXPECT_EQ(decision.schedule, job_.checked[2]);
      EXPECT_STREQ(decision.reason, "planted");
    }
  }
  EXPECT_EQ(taken + wrong + failed, 3);
  EXPECT_EQ(taken, 1);
  EXPECT_FALSE(job_.log.empty());

  std::size_t needed = 0;
  expect_ok(uniep_tuner_results(tuner.get(), nullptr, 0, &needed));
  std::vector<std::byte> bytes(needed);
  EXPECT_EQ(uniep_tuner_results(tuner.get(), bytes.data(), needed - 1, &needed), UNIEP_OVERFLOW);
  expect_ok(uniep_tuner_results(tuner.get(), bytes.data(), needed, &needed));
  expect_ok(uniep_tuner_add_results(tuner.get(), bytes.data(), needed));
  EXPECT_EQ(uniep_tuner_add_results(tuner.get(), bytes.data(), needed - 1), UNIEP_INVALID_ARGUMENT);

  expect_ok(uniep_tuner_freeze(tuner.get()));
  EXPECT_EQ(state(tuner.get()).frozen, 1);
  EXPECT_EQ(state(tuner.get()).wants_round, 0);
  EXPECT_GT(timed_, static_cast<uint64_t>(now.tried_calls));
  EXPECT_LT(timed_, calls_);
  uniep_tuner_call call{};
  call.size = sizeof(call);
  expect_ok(uniep_tuner_schedule(tuner.get(), 0, UNIEP_FORWARD, &call));
  EXPECT_EQ(call.timed, 0);
}

TEST_F(CTuner, KeepsWhatItFindsForItsOwnBuild) {
  const TemporaryFolder folder;
  options_.folder = folder.path().c_str();
  options_.machine_name = "made up";
  {
    const TunerHandle tuner = make();
    for (int i = 0; i < 40; ++i) step(tuner.get());
  }
  const std::vector<tune::TunedSchedule> kept = tune::TunedFolder(folder.path()).all();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(kept[0].key.machine, "made up, " + library_label());
}

TEST_F(CTuner, RefusesByNameAndGivesTheCallersStatus) {
  const auto because = [](const char* text) {
    EXPECT_NE(std::string(uniep_last_error()).find(text), std::string::npos) << uniep_last_error();
  };
  options_.check = nullptr;
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("options.check");
  options_.check = Job::check;
  options_.ranks = 2;
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("options.give and take: NULL, and options.rank and ranks are 0 and 2");
  options_.take = Job::take;
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("options.give");
  options_.give = Job::give;
  options_.take = Job::take;
  job_.exchange = UNIEP_TIMEOUT;
  EXPECT_EQ(refused(), UNIEP_TIMEOUT);
  because("take: message 0");
  job_.exchange = UNIEP_OK;
  tuned_.forward = "order.raster=0";
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("order.raster");
  tuned_.forward = nullptr;
  options_.layer_count = 0;
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("options.layer_count");
  options_.layer_count = 1;
  tuned_.tokens = -1;
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("tokens: -1");
  tuned_.tokens = 64;
  options_.folder = "somewhere";
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("machine_name");
  options_.machine_name = "gpu\xff";
  EXPECT_EQ(refused(), UNIEP_INVALID_ARGUMENT);
  because("machine_name: 'gpu\\xff, ");
  options_.machine_name = nullptr;
  options_.folder = nullptr;

  const TunerHandle tuner = make();
  for (int i = 0; i < 3; ++i) step(tuner.get());
  uniep_tuner_call call{};
  call.size = sizeof(call);
  EXPECT_EQ(uniep_tuner_schedule(tuner.get(), 1, UNIEP_FORWARD, &call), UNIEP_INVALID_ARGUMENT);
  EXPECT_EQ(uniep_tuner_schedule(tuner.get(), 0, 2, &call), UNIEP_INVALID_ARGUMENT);
  expect_ok(uniep_tuner_schedule(tuner.get(), 0, UNIEP_FORWARD, &call));
  EXPECT_EQ(uniep_tuner_measured(tuner.get(), &call, 0, 0, 0), UNIEP_INVALID_ARGUMENT);
  expect_ok(uniep_tuner_failed(tuner.get(), &call, "planted"));
  expect_ok(uniep_tuner_not_measured(tuner.get(), &call));
  EXPECT_EQ(uniep_tuner_not_measured(nullptr, &call), UNIEP_INVALID_ARGUMENT);
  call.layer = 1;
  EXPECT_EQ(uniep_tuner_not_measured(tuner.get(), &call), UNIEP_INVALID_ARGUMENT);
  because("layer: 1");
  job_.exchange = UNIEP_TIMEOUT;
  EXPECT_EQ(uniep_tuner_step(tuner.get()), UNIEP_TIMEOUT);
  EXPECT_EQ(state(tuner.get()).frozen, 1);
}

}  // namespace
}  // namespace uniep::test
