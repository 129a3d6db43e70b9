#include "support/made_up_job.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/hash64.h"
#include "support/random_schedule_case.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

constexpr int kLate = 64;  // ranks that are late by turns

double unit(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  const uint64_t mixed = io::avalanche64(io::avalanche64(io::avalanche64(seed * 64 + a) + b) + c);
  return static_cast<double>(mixed >> 11) * 0x1p-53;
}

ScheduleCase job_case(const MadeUpJob& job) {
  ScheduleCase where;
  where.shape = {64, 64, 64, 2};
  where.machine = {EngineKind::kCpu, job.ranks, 4};
  return where;
}

constexpr int kFirstRaster = 1, kRasters = 16;

}  // namespace

Schedule job_schedule(int i) {
  ScheduleCase where;
  Schedule schedule = where.filled(PartialSchedule::parse("order.experts_per_wave=1"));
  schedule.order.raster = kFirstRaster + i % kRasters;
  schedule.comm.stages = 2 + i / kRasters;
  return schedule;
}

int job_number(const Schedule& schedule) {
  return schedule.order.raster - kFirstRaster + (schedule.comm.stages - 2) * kRasters;
}

TunerOptions job_options(const MadeUpJob& job, int rank, std::shared_ptr<TunerExchange> exchange) {
  const ScheduleCase where = job_case(job);
  TunerOptions options;
  options.rank = rank;
  options.ranks = job.ranks;
  options.machine = where.machine;
  options.machine_name = "made up";
  options.layers.resize(1);
  TunerLayer& layer = options.layers.front();
  layer.config = {where.shape, where.numerics};
  layer.tokens = 64;
  layer.forward = job_schedule(0);
  ScheduleCase backward = where;
  backward.direction = Direction::kBackward;
  layer.backward = backward.filled(PartialSchedule::parse("order.raster=1,comm.stages=2"));
  options.exchange = std::move(exchange);
  options.check = [job](int, Direction, const Schedule& candidate, const Schedule&) -> TunerCheck {
    const int i = job_number(candidate);
    if (job.fails_in_check.contains(i)) throw Error(Status::kTimeout, "rank 1 waits for rank 0");
    if (job.refused.contains(i)) return {true, 1, "needs more memory"};
    return {!job.wrong.contains(i), 1, ""};
  };
  options.candidates = [job](int, Direction direction, const Schedule& incumbent) {
    std::vector<Schedule> all;
    for (int i = 0; i < static_cast<int>(job.factors.size()); ++i) {
      Schedule schedule = incumbent;
      schedule.order.raster = job_schedule(i).order.raster;
      schedule.comm.stages = job_schedule(i).comm.stages;
      if (direction == Direction::kForward) all.push_back(schedule);
    }
    return all;
  };
  options.forecast = [](int, Direction, double, double mean_rows) { return mean_rows; };
  options.folder = job.folder;
  options.budget = job.budget;
  options.batch = job.batch;
  options.until = job.until;
  options.group = job.group;
  options.groups = job.groups;
  return options;
}

std::string JobOutcome::text() const {
  return nlohmann::json{{"incumbent", incumbent}, {"hash", calls_hash}, {"used", used},   {"decisions", decisions},
                        {"at", decided_at},       {"pairs", pairs},     {"lost", lost},   {"layers", layers},
                        {"over", most_over},      {"log", log},         {"error", error}, {"rounds", rounds},
                        {"early", early}}
      .dump();
}

JobOutcome JobOutcome::parse(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text);
  JobOutcome outcome;
  outcome.incumbent = json["incumbent"];
  outcome.calls_hash = json["hash"];
  outcome.used = json["used"].get<std::vector<int>>();
  outcome.decisions = json["decisions"].get<std::vector<std::string>>();
  outcome.decided_at = json["at"].get<std::vector<int64_t>>();
  outcome.pairs = json["pairs"].get<std::vector<int>>();
  outcome.lost = json["lost"];
  outcome.layers = json["layers"];
  outcome.most_over = json["over"];
  outcome.log = json["log"].get<std::vector<std::string>>();
  outcome.error = json["error"];
  outcome.rounds = json["rounds"];
  outcome.early = json["early"];
  return outcome;
}

bool JobOutcome::has(const std::string& decision) const {
  return std::find(decisions.begin(), decisions.end(), decision) != decisions.end();
}

bool JobOutcome::mentions(const std::string& part) const {
  return std::any_of(log.begin(), log.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

MadeUpRank::MadeUpRank(const MadeUpJob& job, int rank, std::shared_ptr<TunerExchange> exchange)
    : job_(job), rank_(rank) {
  outcome_.used.resize(job.factors.size());
  TunerOptions options = job_options(job, rank, std::move(exchange));
  options.log = [this](const std::string& line) { outcome_.log.push_back(line); };
  if (!job.compiled_at.empty()) {
    options.prepare = [this](int, Direction, const Schedule& candidate) {
      const int i = job_number(candidate);
      if (!is_compiled(i)) return Preparation{2, ""};
      return Preparation{0, job_.never_compiles.contains(i) ? "the compiler says no" : ""};
    };
    options.check = [this, check = options.check](int layer, Direction direction, const Schedule& candidate,
                                                  const Schedule& incumbent) {
      outcome_.early += !is_compiled(job_number(candidate));
      return check(layer, direction, candidate, incumbent);
    };
  }
  tuner_ = std::make_unique<Tuner>(std::move(options));
}

bool MadeUpRank::is_compiled(int candidate) const {
  const auto found = job_.compiled_at.find(candidate);
  return found == job_.compiled_at.end() || (tuner_ != nullptr && tuner_->steps() >= found->second);
}

void MadeUpRank::call(Direction direction, int k) {
  const TunerCall planned = tuner_->schedule(0, direction);
  const int i = job_number(planned.schedule);
  const bool forward = direction == Direction::kForward;
  outcome_.calls_hash = io::avalanche64(outcome_.calls_hash + io::kGolden64 + static_cast<uint64_t>(i));
  if (forward) ++outcome_.used[static_cast<std::size_t>(i)];
  if (forward) outcome_.early += !is_compiled(i);
  const auto step = static_cast<uint64_t>(tuner_->steps()), number = static_cast<uint64_t>(k) + (forward ? 0 : 1000);
  const bool changed = job_.changes_at > 0 && tuner_->steps() >= job_.changes_at;
  // What all ranks have in common.
  const double rows = 1000 * (0.8 + 0.4 * unit(job_.seed, 1, step, number));
  double time = rows / 100 * job_.factors[static_cast<std::size_t>(i)] * (1 + 0.0002 * static_cast<double>(step)) *
                (1 + job_.noise * 2 * (unit(job_.seed, 2, step, number) - 0.5));
  if (unit(job_.seed, 3, step, number) < 0.03) time *= 1.5;
  if (changed) time *= job_.slower_from;
  // Each waits for the rank that comes last, and sees that in its own time.
  double own_wait = 0;
  if (job_.ranks > 1) {
    const int last = static_cast<int>(unit(job_.seed, 4, step, number) * job_.ranks);
    own_wait = rank_ == last ? 0 : time * unit(job_.seed, 5 + static_cast<uint64_t>(rank_ % kLate), step, number);
  }
  const auto fails = job_.fails.find(i), hangs = job_.hangs.find(i);
  if (fails != job_.fails.end() && fails->second == rank_) return tuner_->failed(planned, "time-out");
  if (hangs != job_.hangs.end() && hangs->second == rank_) return;
  const double busiest = rows * (changed ? job_.skew_from : 1);
  tuner_->measured(planned, {time + own_wait, busiest, rows});
}

void MadeUpRank::step() {
  if (tuner_->wants_round()) {
    ++outcome_.rounds;
    tuner_->begin_round();
  }
  for (int k = 0; k < job_.calls; ++k) {
    call(Direction::kForward, k);
    if (job_.backward) call(Direction::kBackward, k);
  }
  tuner_->step();
  const TunerSpent spent = tuner_->spent();
  outcome_.most_over = std::max(outcome_.most_over, spent.lost_milliseconds - job_.budget * spent.layers_milliseconds);
}

JobOutcome MadeUpRank::outcome() const {
  JobOutcome outcome = outcome_;
  outcome.incumbent = job_number(tuner_->incumbent(0, Direction::kForward));
  outcome.lost = tuner_->spent().lost_milliseconds;
  outcome.layers = tuner_->spent().layers_milliseconds;
  for (const TunerDecision& decision : tuner_->decisions()) {
    outcome.decisions.push_back(decision.verdict + " " + std::to_string(job_number(decision.schedule)));
    outcome.decided_at.push_back(decision.step);
    outcome.pairs.push_back(decision.pairs);
  }
  return outcome;
}

JobOutcome run_made_up_rank(const MadeUpJob& job, int rank, std::shared_ptr<TunerExchange> exchange) {
  JobOutcome failed;
  try {
    MadeUpRank own(job, rank, std::move(exchange));
    try {
      for (int step = 0; step < job.steps; ++step) own.step();
      return own.outcome();
    } catch (const Error& error) {
      failed = own.outcome();
      failed.error = error.what();
    }
  } catch (const Error& error) {
    failed.error = error.what();
  }
  return failed;
}

}  // namespace uniep::test
