#include "sim/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "program/buildable.h"
#include "program/recompute.h"
#include "sim/event_run.h"
#include "uniep/error.h"

namespace uniep::sim {
namespace {

constexpr int kMaxRuns = 4;
constexpr double kCloseEnough = 0.002;  // of a clock
constexpr double kNearEnough = 0.01;    // where times are put right
constexpr double kMinLoad = 0.3;
constexpr double kOwnShare = 0.6;  // of what a load does to the clock at the power limit, that it does at once

double by_load(const Clock& clock, double load, double share) {
  return std::pow(std::clamp(load, kMinLoad, 1.0), -share * clock.limit_exponent);
}

// Bytes that go in and out of each rank by links, [level][rank].
double links_ms(const Program& program, const MachineDescription& machine, const std::vector<RankCosts>& costs,
                double relayed) {
  const int ranks = program.ranks();
  if (ranks == 1) return 0;
  const bool one = costs.size() == 1;
  const double row = 2.0 * static_cast<double>(program.request().shape.hidden);
  std::vector<double> in(machine.links.size() * ranks), out(in.size());
  for (std::size_t rank = 0; rank < costs.size(); ++rank) {
    const RankProgram& p = program.rank(static_cast<int>(rank));
    bool combines = false;
    for (int launch = 0; launch < p.launches; ++launch) combines |= p.stages[launch].combine;
    const auto carry = [&](int from, int to, double bytes) {
      if (from == to) return;
      const std::size_t level = machine.level_between(from, to), begin = level * ranks;
      const LinkRate rate = machine.link_rate(static_cast<int>(level), std::min(ranks, machine.links[level].ranks));
      const double ms = bytes / (std::max({rate.read, rate.write, rate.both}) * 1e6);
      in[begin + (one ? 0 : to)] += ms;
      if (!one) out[begin + from] += ms;
    };
    for (int32_t expert = 0; expert < p.local_experts; ++expert) {
      for (int32_t block = p.block_begin[expert]; block < p.block_begin[expert + 1]; ++block) {
        const RankCosts::Sources sources = costs[rank].sources(block);
        for (const PeerRows* source = sources.begin; combines && source != sources.end; ++source) {
          // With groups a token's rows of one group come back as one.
          const double share = p.combine_groups > 0 ? 1.0 / p.topk : 1.0;
          carry(p.rank, source->peer, share * row * source->rows);
        }
      }
    }
    const std::vector<int64_t>& fetched = costs[rank].fetched();
    for (int source = 0; source < static_cast<int>(fetched.size()); ++source) {
      const bool far = source != p.rank && machine.level_between(source, p.rank) > 0;
      carry(source, p.rank, static_cast<double>(fetched[source]) * p.operands * row * (far ? relayed : 1.0));
    }
  }
  return std::max(*std::max_element(in.begin(), in.end()), *std::max_element(out.begin(), out.end()));
}

}  // namespace

void Turns::add(double call_us, double load, int as_many) {
  us += as_many * call_us;
  weighted_us += as_many * call_us * std::pow(std::clamp(load, kMinLoad, 1.0), 1 - kOwnShare);
  calls += as_many;
}

double Turns::limit_ghz(const Clock& clock) const {
  const double share = std::max(weighted_us / (us + calls * clock.rest), 1e-3);
  return clock.limit * std::pow(share, -clock.limit_exponent);
}

double clock_of(const Clock& clock, const SimulateOptions& options, double load, double us, bool linked) {
  if (options.state == State::kPaused) {
    const double left = std::max(clock.pause_lowest, clock.pause - clock.pause_drop * us * 1e-3);
    return std::min(clock.highest, left * by_load(clock, load, 1));
  }
  double limited;
  if (options.limit_ghz == 0) {
    // As Turns says of this call alone, with one power: solvers ask a million times a second.
    const double share = std::max(std::clamp(load, kMinLoad, 1.0) * us / (us + clock.rest), 1e-3);
    limited = clock.limit * std::pow(share, -clock.limit_exponent);
  } else {
    limited = options.limit_ghz * by_load(clock, load, kOwnShare);
  }
  if (linked) limited *= 1 - clock.linked;
  if (limited > clock.pause) limited = std::min(limited, clock.pause * by_load(clock, load, 1));
  return std::min(clock.highest, limited);
}

double Limits::bound_ms() const {
  return std::max({gemm_ms, links_ms, memory_ms}) + begin_end_ms;
}

const char* Limits::name() const {
  const double most = std::max({gemm_ms, links_ms, memory_ms, begin_end_ms});
  return most == gemm_ms ? "gemm" : most == links_ms ? "links" : most == memory_ms ? "memory" : "begin and end";
}

ProgramRequest simulated_request(const LayerShape& shape, const Numerics& numerics, const Schedule& schedule,
                                 Direction direction, const MachineDescription& machine) {
  ProgramRequest request;
  request.shape = shape;
  request.numerics = numerics;
  request.schedule = schedule;
  request.direction = direction;
  request.redispatch = direction == Direction::kBackward && dispatches_x_again(schedule, true);
  request.workers = static_cast<int>(machine.class_of(Work::kFc1).count);
  const GemmStage stage = direction == Direction::kForward ? GemmStage::kFc1 : GemmStage::kDgradFc2;
  request.cluster = schedule.tile_of(stage).cluster;
  request.pull_parts = pull_parts(shape);
  return request;
}

std::vector<TileEvent> tile_events(const Program& program, const std::vector<TimedTask>& timeline) {
  std::vector<TileEvent> events;
  events.reserve(timeline.size());
  const auto nanoseconds = [](double us) { return static_cast<int64_t>(us * 1e3); };
  for (const TimedTask& timed : timeline) {
    const RankProgram& p = program.rank(timed.rank);
    const Task& task = timed.task;
    const bool global = task.stage == Stage::kPush, none = task.stage == Stage::kGroupSend || task.expert < 0;
    events.push_back({timed.rank, timed.worker, timed.copy_agent, stage_name(task.stage, p.direction),
                      none     ? -1
                      : global ? task.expert
                               : p.first_expert + task.expert,
                      task.m, task.n, nanoseconds(timed.wait_begin), nanoseconds(timed.begin), nanoseconds(timed.end)});
  }
  return events;
}

namespace {

void require_simulable(const Program& program, const MachineDescription& machine, const SimulateOptions& options) {
  if (program.ranks() > machine.most_ranks()) {
    throw Error(Status::kInvalidArgument, fmt::format("ranks: {}; machine {} links at most {}", program.ranks(),
                                                      machine.name, machine.most_ranks()));
  }
  for (int rank = 1; options.one_rank && rank < program.ranks(); ++rank) {
    if (program.rank(rank).tokens == program.rank(0).tokens) continue;
    throw Error(Status::kInvalidArgument,
                fmt::format("one rank for all: rank {} has {} tokens and rank 0 {}; must be as many on all ranks", rank,
                            program.rank(rank).tokens, program.rank(0).tokens));
  }
}

struct AgreedClock {
  double ghz, us;  // the call at that clock
};

// Tiles follow the clock, the rest does not: where the two agree, after a run of `us` at `clock`.
// `clock_at`: the clock under a share of busy tensor cores, for so long. That of the busiest rank, for which the others
// wait.
template <typename ClockAt>
AgreedClock agreed_clock(const EventRun::Result& run, double us, double clock, double workers, ClockAt&& clock_at) {
  const double busy = *std::max_element(run.gemm_us_of_rank.begin(), run.gemm_us_of_rank.end()) / workers;
  const double load = *std::max_element(run.load_us_of_rank.begin(), run.load_us_of_rank.end()) / workers;
  const double cycles = busy * clock, rest = std::max(us - busy, 0.0);
  double next = clock;
  for (int step = 0; step < 20; ++step) {
    const double then = cycles / next + rest;
    next = 0.5 * (next + clock_at(load * clock / next / then, then));
  }
  return {next, cycles / next + rest};
}

// What ran at one clock as if it had run at another one, which is near. A tile's waits for memory, which follows none,
// count as its cycles.
void put_right(EventRun::Result& run, double us, double clock, const AgreedClock& agreed) {
  const auto scale = [](std::vector<double>& all, double by) {
    for (double& one : all) one *= by;
  };
  scale(run.end_us, agreed.us / us);
  scale(run.gemm_us_of_rank, clock / agreed.ghz);
  scale(run.load_us_of_rank, clock / agreed.ghz);
}

std::map<std::string, StageTime> stage_times(const EventRun::Result& run, Direction direction, double workers) {
  std::map<std::string, StageTime> times;
  for (int i = 0; i < kStageCount; ++i) {
    const EventRun::Totals& totals = run.stage[i];
    if (totals.begin_us < 0) continue;
    StageTime& stage = times[stage_name(static_cast<Stage>(i), direction)];
    const bool first = stage.busy_ms == 0;
    stage.begin_ms = first ? totals.begin_us * 1e-3 : std::min(stage.begin_ms, totals.begin_us * 1e-3);
    stage.end_ms = std::max(stage.end_ms, totals.end_us * 1e-3);
    stage.busy_ms += totals.busy_us * 1e-3 / workers;
  }
  return times;
}

// What backward runs before its own Program.
std::vector<double> recomputing_ms(const Program& program, const MachineDescription& machine,
                                   const SimulateOptions& options) {
  const ProgramRequest& backward = program.request();
  const Schedule schedule =
      recompute_schedule(backward.schedule, {.direction = Direction::kBackward,
                                             .shape = backward.shape,
                                             .numerics = backward.numerics,
                                             .machine = schedule_machine(machine, program.ranks())});
  ProgramRequest request = simulated_request(backward.shape, backward.numerics, schedule, Direction::kForward, machine);
  request.part = ProgramPart::kRecompute;
  request.redispatch = backward.schedule.save_xg == SaveXg::kRedispatch;
  const Program again(request, program.shared_placement());
  return simulate(again, machine,
                  {.state = options.state, .limit_ghz = options.limit_ghz, .one_rank = options.one_rank})
      .ms_per_rank;
}

}  // namespace

Simulated simulate(const Program& program, const MachineDescription& machine, const SimulateOptions& options) {
  return simulate(ProgramCosts(program, options.one_rank), machine, options);
}

Simulated simulate(const ProgramCosts& of, const MachineDescription& machine, const SimulateOptions& options) {
  const Program& program = of.program;
  const std::vector<RankCosts>& costs = of.ranks;
  require_simulable(program, machine, options);
  const std::size_t simulated = options.one_rank ? 1 : program.ranks();
  if (costs.size() != simulated) throw Error(Status::kInternal, "simulate: costs of as many ranks as are simulated");
  double relayed = 1;
  if (machine.links.size() > 1 && machine.links[1].relay && program.ranks() > machine.links[0].ranks) {
    relayed = relayed_share(program, machine.links[0].ranks);
  }

  // The clock follows from the load, and the load from the clock.
  const double workers_of_rank = machine.class_of(Work::kFc1).count;
  double clock = options.state == State::kSustained ? machine.clock.limit : machine.clock.pause;
  const bool near = options.near_ghz > 0 && !options.record;
  if (near) clock = options.near_ghz;
  EventRun::Result run;
  Simulated simulated_call;
  const auto set_load = [&](double us) {
    simulated_call.clock_ghz = clock;
    simulated_call.load =
        *std::max_element(run.load_us_of_rank.begin(), run.load_us_of_rank.end()) / (workers_of_rank * us);
  };
  for (int i = 0; i < kMaxRuns; ++i) {
    run = EventRun(program, machine, options, {costs, relayed, clock}).run();
    const double us = *std::max_element(run.end_us.begin(), run.end_us.end());
    set_load(us);
    const AgreedClock next = agreed_clock(run, us, clock, workers_of_rank, [&](double share, double call_us) {
      return clock_of(machine.clock, options, share, call_us, program.ranks() > 1);
    });
    const double apart = std::abs(next.ghz / clock - 1);
    if (near && apart < kNearEnough) {
      put_right(run, us, clock, next);
      clock = next.ghz;
      set_load(next.us);
      break;
    }
    if (apart < kCloseEnough) break;
    if (i + 1 < kMaxRuns) clock = next.ghz;
  }

  simulated_call.tasks = run.tasks;
  simulated_call.timeline = std::move(run.timeline);
  for (const double us : run.end_us) simulated_call.ms_per_rank.push_back(us * 1e-3);
  const ProgramRequest& request = program.request();
  const bool again = request.direction == Direction::kBackward && request.schedule.save_z == SaveZ::kRecompute;
  if (again && request.part == ProgramPart::kLayer) {
    const std::vector<double> before = recomputing_ms(program, machine, options);
    simulated_call.again_ms = *std::max_element(before.begin(), before.end());
    for (std::size_t i = 0; i < before.size(); ++i) simulated_call.ms_per_rank[i] += before[i];
  }
  simulated_call.ms = *std::max_element(simulated_call.ms_per_rank.begin(), simulated_call.ms_per_rank.end());
  Limits& limits = simulated_call.limits;
  const double workers = program.rank(0).workers;
  limits.gemm_ms = *std::max_element(run.gemm_us_of_rank.begin(), run.gemm_us_of_rank.end()) * 1e-3 / workers;
  limits.memory_ms =
      *std::max_element(run.memory_bytes.begin(), run.memory_bytes.end()) / (machine.memory.bandwidth * 1e6);
  limits.links_ms = links_ms(program, machine, costs, relayed);
  limits.begin_end_ms = (machine.begin_us(program.ranks()) + machine.time.end) * 1e-3;
  simulated_call.stages = stage_times(run, program.request().direction, workers * static_cast<double>(simulated));
  return simulated_call;
}

}  // namespace uniep::sim
