#include "support/bitwise.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "engine/cpu/engine.h"
#include "engine/cpu/run_call.h"
#include "program/recompute.h"
#include "program/schedule_space.h"
#include "support/disturb.h"
#include "support/layer_arrays.h"

namespace uniep::test {
namespace {

// Which agents that belong together share a thread.
void count_threads(BranchCounts& branches, const cpu::CpuEngine& engine, const Program& program) {
  const int64_t workers = program.rank(0).workers;
  const auto thread = [&](int64_t worker, AgentRole role) {
    return cpu::thread_of_agent(engine.disturbance(), worker, role, engine.threads());
  };
  bool one = false, two = false, one_of_pair = false, two_of_pair = false;
  for (int64_t worker = 0; worker < workers * program.ranks(); ++worker) {
    const bool together = thread(worker, AgentRole::kCopy) == thread(worker, AgentRole::kCompute);
    (together ? one : two) = true;
    if (program.rank(0).cluster == 1 || worker % 2 != 0) continue;
    const bool pair_together = thread(worker, AgentRole::kCompute) == thread(worker + 1, AgentRole::kCompute);
    (pair_together ? one_of_pair : two_of_pair) = true;
  }
  branches.count("both agents of a worker on one thread", one);
  branches.count("the agents of a worker on two threads", two);
  branches.count("both workers of a pair on one thread", one_of_pair);
  branches.count("the workers of a pair on two threads", two_of_pair);
}

// What a random schedule seldom has: mixed GEMMs, and workers that come in pairs. Half of all combinations have it.
const char* const kSeldom[] = {"fusion=layer,order.interleave=mixed,queue=dynamic",
                               "fusion=layer,order.interleave=mixed,queue=dynamic,comm.reserve_sms=0,comm.where=warps",
                               "fusion=layer,order.interleave=mixed,queue=static,comm.reserve_sms=0",
                               "fusion=layer,order.interleave=phased,queue=dynamic,backward.wgrad=mixed",
                               "queue=dynamic,comm.lend_sms=on",
                               "comm.where=sms,comm.dispatch_sms=2,comm.reserve_sms=0",
                               "comm.where=sms,dispatch.transport=push,comm.relay_sms=1,comm.reserve_sms=0"};
// And more rows an expert than a block has, so that it may have several waves.
const char* const kParted =
    "fusion=layer,order.experts_per_wave=1,order.blocks_per_wave=1,tile.m=64,comm.where=warps,comm.reserve_sms=0";

}  // namespace

std::string run_random_combination(uint64_t seed, BranchCounts& branches) {
  const bool parts = seed % 10 == 0;
  RandomLayerLimits limits{.any_activation = true};
  if (parts) limits.most_tokens = 240;
  const RandomLayer layer = random_layer(seed, limits);
  Random random(~seed);
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  const bool seldom = seed % 2 == 0;
  options.workers = static_cast<int>(seldom ? random.between(2, 7) : random.between(1, 6));
  const uint64_t shuffle = std::max<uint64_t>(random.next(), 1);
  Group group(options);
  disturb(group, {.shuffle_seed = shuffle});

  const char* const fields = parts ? kParted : seldom ? kSeldom[random.next() % std::size(kSeldom)] : "auto";
  const PartialSchedule some = PartialSchedule::parse(fields);
  const LayerConfig& config = layer.config;
  const Schedule forward = sample_legal(random.next(),
                                        {.direction = Direction::kForward,
                                         .shape = config.shape,
                                         .numerics = config.numerics,
                                         .machine = group.machine()},
                                        some);
  PartialSchedule fixed = some;
  agree_on_saves(fixed, forward, random);
  const Schedule backward = sample_legal(random.next(),
                                         {.direction = Direction::kBackward,
                                          .shape = config.shape,
                                          .numerics = config.numerics,
                                          .machine = group.machine()},
                                         fixed);
  const auto time = random.one_in(2) ? WeightGradientTime::kNow : static_cast<WeightGradientTime>(random.between(1, 2));
  const bool last_use = random.one_in(2);

  std::string problem;
  try {
    LayerArrays arrays(layer);
    const Placement placement = place(group, config.shape, arrays.routings);
    Saved saved = uniep::forward(group, config, forward, placement, arrays.forward_arguments());
    arrays.gather_z(saved);
    const PendingWeightGradients work =
        uniep::backward(group, config, backward, saved,
                        arrays.backward_arguments(time, last_use, backward.save_z == SaveZ::kRecompute));
    saved = Saved();
    if (time == WeightGradientTime::kLater) weight_gradients(group, work, arrays.weight_gradient_arguments());
    problem = difference(arrays.result, arrays.expected(time));
    const auto& engine = dynamic_cast<const cpu::CpuEngine&>(group.implementation());
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Schedule& schedule = direction == Direction::kForward ? forward : backward;
      const bool redispatch =
          direction == Direction::kBackward && dispatches_x_again(schedule, time != WeightGradientTime::kNone);
      ProgramRequest request = engine.request(config, schedule, direction, redispatch);
      request.weight_gradients = time == WeightGradientTime::kNow;
      const Program program(request, placement.state());
      count_schedule(branches, program);
      count_threads(branches, engine, program);
    }
    count_layer(branches, layer);
    count_activation(branches, config.numerics);
    branches.count("weight gradients now", time == WeightGradientTime::kNow);
    branches.count("weight gradients later", time == WeightGradientTime::kLater);
    branches.count("no weight gradients", time == WeightGradientTime::kNone);
    branches.count("the last use of a saved state", last_use);
    const bool recomputes = backward.save_z == SaveZ::kRecompute;
    branches.count("FC1 again on rows that were kept", recomputes && backward.save_xg == SaveXg::kKeep);
    branches.count("FC1 again beside its dispatch", recomputes && backward.save_xg == SaveXg::kRedispatch);
    branches.count("an odd shuffle seed", shuffle % 2 == 1);
    branches.count("an even shuffle seed", shuffle % 2 == 0);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (problem.empty()) return "";
  return fmt::format("{}\n  {} workers {} shuffle {} weight gradients {}{}\n  forward  {}\n  backward {}", problem,
                     layer.description, options.workers, shuffle, static_cast<int>(time), last_use ? " last use" : "",
                     to_text(forward), to_text(backward));
}

}  // namespace uniep::test
