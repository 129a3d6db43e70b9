#include "engine/cuda/calls/call_memory.h"

#include "engine/cuda/calls/engine.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/calls/rank_calls.h"
#include "engine/cuda/place/placed_tables.h"
#include "engine/workspace.h"
#include "program/buildable.h"
#include "program/recompute.h"

namespace uniep::cuda {

ProgramRequest call_request(const Machine& machine, const LayerConfig& config, const Schedule& schedule,
                            Direction direction, const MemoryOptions& use) {
  require_summable(config.shape, config.numerics);
  require_countable(config.shape);
  require_instantiable(schedule, config.numerics, direction);
  if (machine.processes && schedule.dispatch.transport == DispatchTransport::kPush) refuse_push();
  ProgramRequest request;
  request.shape = config.shape;
  request.numerics = config.numerics;
  request.schedule = schedule;
  request.direction = direction;
  request.workers = machine.workers;
  request.cluster = cluster_of(schedule, direction);
  request.weight_gradients = use.weight_gradients == WeightGradientTime::kNow;
  request.redispatch = direction == Direction::kBackward &&
                       dispatches_x_again(schedule, use.weight_gradients != WeightGradientTime::kNone);
  request.pull_parts = pull_parts(config.shape);
  return request;
}

std::optional<ProgramRequest> recompute_request(const Machine& machine, const LayerConfig& config,
                                                const Schedule& backward) {
  if (backward.save_z == SaveZ::kKeep) return {};
  const Schedule schedule = recompute_schedule(
      backward,
      {.direction = Direction::kBackward, .shape = config.shape, .numerics = config.numerics, .machine = machine});
  ProgramRequest asked = call_request(machine, config, schedule, Direction::kForward);
  asked.part = ProgramPart::kRecompute;
  asked.redispatch = backward.save_xg == SaveXg::kRedispatch;
  return asked;
}

SymmetricNeed symmetric_need(const Machine& machine, const ProgramRequest& request,
                             const internal::PlacementState& placement, const SignalLayout& layout,
                             int copied_operands) {
  const int64_t tokens = most_tokens(placement);
  const int64_t row_bytes = request.shape.hidden * static_cast<int64_t>(sizeof(BFloat16));
  SymmetricNeed need;
  need.flags = layout.flag_total * static_cast<int64_t>(sizeof(uint32_t));
  need.slots = tokens * internal::slots_per_token(request.shape, request.numerics) * row_bytes;
  // A combine has them or not by its pointers, of which a rank without tokens and rows may have none: all ask for them.
  if (request.direction == Direction::kBackward || request.part == ProgramPart::kCombine) {
    need.prob_slots = tokens * request.shape.topk * static_cast<int64_t>(sizeof(float));
  }
  // With a process a GPU whether a rank copies or not: all ask for the same, whatever each is given.
  const int operands = request.redispatch && request.part == ProgramPart::kLayer ? 2 : 1;
  need.inputs = (machine.processes ? operands : copied_operands) * tokens * row_bytes;
  if (machine.processes) need.rows = row_table_bytes(placement);
  return need;
}

std::vector<MemoryNeed> memory_need(const Machine& machine, const LayerConfig& config, const Schedule& schedule,
                                    const Placement& placement, const MemoryOptions& options) {
  const internal::PlacementState& placed = *placement.state();
  const auto symmetric_of = [&](const ProgramRequest& request) {
    const Program program(request, placement.state());
    return symmetric_need(machine, request, placed, signal_layout(program_on_host(program, 0)), 0);
  };
  SymmetricNeed symmetric = symmetric_of(call_request(machine, config, schedule, options.direction, options));
  if (options.direction == Direction::kBackward) {
    const std::optional<ProgramRequest> again = recompute_request(machine, config, schedule);
    if (again) symmetric = most_of(symmetric, symmetric_of(*again));
  }
  std::vector<MemoryNeed> needs;
  for (int rank = 0; rank < machine.ranks; ++rank) {
    MemoryNeed need =
        internal::block_sizes(internal::memory_request(config, schedule, placed, rank, options), options.direction);
    need.symmetric_bytes = static_cast<std::size_t>(symmetric.total());
    needs.push_back(need);
  }
  return needs;
}

}  // namespace uniep::cuda
