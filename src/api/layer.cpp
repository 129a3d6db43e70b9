#include "uniep/layer.h"

#include <fmt/format.h>

#include "api/check_arrays.h"
#include "api/check_call.h"
#include "engine/call_timer_state.h"
#include "engine/engine.h"
#include "engine/workspace.h"
#include "model/activation_choice.h"
#include "model/place.h"
#include "model/refuse.h"
#include "uniep/call_timer.h"

namespace uniep {

using api::check_array;
using api::check_b1;
using api::check_call;
using api::check_dw1;
using api::check_dw2;
using api::check_owner;
using api::check_schedule;
using api::check_weights;
using api::collective;
using api::inside;

namespace {

// Forward's activation and backward's; the weight gradients may leave in another way.
void check_same_numerics(const Numerics& saved, const Numerics& given) {
  const std::string was = activation_text(saved), is = activation_text(given);
  if (was != is) refuse(fmt::format("activation: {} in backward; that forward ran with {}", is, was));
  if (saved.bias != given.bias) {
    refuse(fmt::format("bias: {:d} in backward; that forward ran with {:d}", given.bias, saved.bias));
  }
  if (saved.router_weight == given.router_weight) return;
  refuse(fmt::format("router_weight: {} in backward; that forward ran with {}", router_weight_text(given.router_weight),
                     router_weight_text(saved.router_weight)));
}

const char* name_of(WeightGradientTime time) {
  switch (time) {
    case WeightGradientTime::kNow:
      return "now";
    case WeightGradientTime::kLater:
      return "later";
    case WeightGradientTime::kNone:
      return "none";
  }
  return nullptr;
}

void check_time(WeightGradientTime time) {
  if (name_of(time) != nullptr) return;
  refuse(fmt::format("weight_gradients: {}; legal are now (0), later (1) and none (2)", static_cast<int>(time)));
}

// What all local ranks say alike.
MemoryOptions common_use(std::span<const BackwardArguments> arguments, int first_rank) {
  const MemoryOptions use{.weight_gradients = arguments[0].weight_gradients,
                          .last_use = arguments[0].last_use,
                          .direction = Direction::kBackward};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const BackwardArguments& own = arguments[i];
    check_time(own.weight_gradients);
    const int rank = first_rank + static_cast<int>(i);
    if (own.weight_gradients != use.weight_gradients) {
      refuse(fmt::format("weight_gradients: {} on rank {}, {} on rank {}; it must be equal on all ranks",
                         name_of(own.weight_gradients), rank, name_of(use.weight_gradients), first_rank));
    }
    if (own.last_use != use.last_use) {
      refuse(fmt::format("last_use: {} on rank {}, {} on rank {}; it must be equal on all ranks", own.last_use, rank,
                         use.last_use, first_rank));
    }
  }
  return use;
}

bool asks_dw1(const WeightGradients& gradients) {
  return gradients.dw1 != nullptr || gradients.dw1_experts != nullptr || gradients.dw1_up != nullptr ||
         gradients.dw1_up_experts != nullptr || gradients.db1 != nullptr || gradients.db1_experts != nullptr;
}
bool asks_dw2(const WeightGradients& gradients) {
  return gradients.dw2 != nullptr || gradients.dw2_experts != nullptr || gradients.db2 != nullptr ||
         gradients.db2_experts != nullptr;
}

[[noreturn]] void refuse_empty_saved() {
  refuse("saved: empty; it comes from forward()");
}

void check_timer(const CallOptions& options, const Group& group) {
  if (options.timer != nullptr) check_owner(options.timer->state(), group, "timer");
}

}  // namespace

Placement place(Group& group, const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) {
  return collective(group, [&] { return group.implementation().place(shape, routings, capacity); });
}

std::vector<MemoryNeed> memory_need(const Group& group, const LayerConfig& config, const Schedule& schedule,
                                    const Placement& placement, const MemoryOptions& options) {
  check_call(group, {config, schedule, options.direction, placement}, group.local_ranks());
  check_time(options.weight_gradients);
  return inside(group, [&] { return group.implementation().memory_need(config, schedule, placement, options); });
}

Preparation prepare(Group& group, const LayerConfig& config, const Schedule& schedule, const MemoryOptions& options) {
  check_shape(config.shape, group.ranks());
  check_schedule(group, config, schedule, options.direction);
  check_time(options.weight_gradients);
  return inside(group, [&] { return group.implementation().prepare(config, schedule, options); });
}

Saved forward(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
              std::span<const ForwardArguments> arguments, const CallOptions& options) {
  return collective(group, [&] {
    check_call(group, {config, schedule, Direction::kForward, placement}, arguments.size());
    check_timer(options, group);
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const int rank = group.first_local_rank() + static_cast<int>(i);
      const bool has_tokens = placement.tokens(rank) > 0;
      check_array(arguments[i].x, "x", rank, has_tokens);
      check_array(arguments[i].y, "y", rank, has_tokens);
      const Weights& weights = arguments[i].weights;
      const int64_t local_experts = config.shape.experts / group.ranks();
      check_weights(weights, config, rank, local_experts);
      check_b1(weights, config, rank, local_experts);
    }
    Saved saved = group.implementation().forward({config, schedule, placement, arguments, options});
    if (!saved.empty()) saved.state().owner = group.implementation().number();
    return saved;
  });
}

Saved attach_saved(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
                   std::span<const CallerMemory> memory) {
  check_call(group, {config, schedule, Direction::kForward, placement}, memory.size());
  auto saved = std::make_shared<internal::SavedState>();
  saved->owner = group.implementation().number();
  saved->config = config;
  saved->placement = placement;
  saved->first_rank = group.first_local_rank();
  for (const CallerMemory& given : memory) {
    const int rank = saved->first_rank + static_cast<int>(saved->ranks.size());
    const internal::MemoryRequest request = internal::memory_request(config, schedule, *placement.state(), rank);
    const std::size_t bytes = internal::block_sizes(request, Direction::kForward).saved_bytes;
    if (bytes > 0) check_array(given.data, "memory", rank, true);
    if (given.bytes != bytes) {  // pieces lie elsewhere in another size
      throw Error(Status::kInvalidArgument,
                  fmt::format("memory: {} bytes on rank {}; must be {}, as forward needed", given.bytes, rank, bytes));
    }
    internal::SavedRank& kept = saved->ranks.emplace_back();
    kept.memory = internal::MemoryBlock({given, "memory"}, {}, bytes, rank, {});
    internal::Carver carver(kept.memory.data());
    const internal::SavedPieces pieces = internal::carve_saved(carver, request);
    kept.z = pieces.z;
    kept.xg = pieces.xg;
  }
  return Saved(saved);
}

PendingWeightGradients backward(Group& group, const LayerConfig& config, const Schedule& schedule, const Saved& saved,
                                std::span<const BackwardArguments> arguments, const CallOptions& options) {
  return collective(group, [&] {
    if (saved.empty()) refuse_empty_saved();
    const internal::SavedState& state = saved.state();
    check_owner(state, group, "saved");
    if (state.used_up) refuse("saved: used up by an earlier backward with last_use");
    check_call(group, {config, schedule, Direction::kBackward, state.placement}, arguments.size());
    check_timer(options, group);
    check_same_numerics(state.config.numerics, config.numerics);
    const MemoryOptions use = common_use(arguments, group.first_local_rank());
    const bool keep = schedule.save_xg == SaveXg::kKeep;
    const bool recompute = schedule.save_z == SaveZ::kRecompute;
    const bool reads_x = !keep && (recompute || use.weight_gradients != WeightGradientTime::kNone);
    const int64_t local_experts = config.shape.experts / group.ranks();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const int rank = group.first_local_rank() + static_cast<int>(i);
      const bool has_tokens = state.placement.tokens(rank) > 0;
      const BackwardArguments& own = arguments[i];
      if (keep && state.ranks[i].xg == nullptr && state.placement.padded_rows(rank) > 0) {
        refuse("save.xg: keep in backward needs a forward that kept xg; that one ran with redispatch");
      }
      if (!recompute && state.ranks[i].z == nullptr && state.placement.padded_rows(rank) > 0) {
        refuse("save.z: keep in backward needs a forward that kept z; that one ran with recompute");
      }
      check_array(own.dy, "dy", rank, has_tokens);
      check_array(own.x, "x (save.xg = redispatch)", rank, has_tokens && reads_x);
      check_array(own.dx, "dx", rank, has_tokens);
      check_array(own.dprobs, "dprobs", rank, has_tokens);
      check_weights(own.weights, config, rank, local_experts);
      if (recompute) check_b1(own.weights, config, rank, local_experts);
      if (use.weight_gradients != WeightGradientTime::kNow) continue;
      check_dw1(own.gradients, config, rank, local_experts);
      check_dw2(own.gradients, config, rank, local_experts);
    }
    PendingWeightGradients work(group.implementation().backward({config, schedule, saved, arguments, options, use}));
    if (!work.empty()) work.state().owner = group.implementation().number();
    return work;
  });
}

void weight_gradients(Group& group, const PendingWeightGradients& work,
                      std::span<const WeightGradientArguments> arguments) {
  if (work.empty()) refuse("work: empty; it comes from backward() with weight_gradients = later");
  internal::PendingState& state = work.state();
  check_owner(state, group, "work");
  const LayerShape& shape = state.config.shape;
  if (arguments.size() != state.ranks.size()) {
    refuse(fmt::format("arguments: {} given; one for each of the {} local ranks is needed", arguments.size(),
                       state.ranks.size()));
  }
  const bool dw1 = asks_dw1(arguments[0].gradients), dw2 = asks_dw2(arguments[0].gradients);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const int rank = state.first_rank + static_cast<int>(i);
    const WeightGradients& own = arguments[i].gradients;
    if (arguments[i].sms < 0 || arguments[i].sms > group.workers()) {
      refuse(fmt::format("sms: {} on rank {}; legal are 0 (all) to {}", arguments[i].sms, rank, group.workers()));
    }
    if (dw1 || !dw2) check_dw1(own, state.config, rank, shape.experts / group.ranks());
    if (dw2 || !dw1) check_dw2(own, state.config, rank, shape.experts / group.ranks());
    if (asks_dw1(own) != dw1 || asks_dw2(own) != dw2) {
      refuse(fmt::format("gradients: {} on rank {} and not on rank {}; all local ranks ask for the same ones",
                         asks_dw1(own) != dw1 ? "dw1" : "dw2", rank, state.first_rank));
    }
  }
  if (dw1 && state.dw1_done) refuse("work: its dw1 has been made; each work is done once");
  if (dw2 && state.dw2_done) refuse("work: its dw2 has been made; each work is done once");
  inside(group, [&] { group.implementation().weight_gradients({state, arguments, dw1, dw2}); });
}

const BFloat16* Saved::z(int rank) const {
  if (empty()) refuse_empty_saved();
  const int first = state_->first_rank;
  check_index(rank, first, first + static_cast<int64_t>(state_->ranks.size()), "rank");
  return state_->ranks[static_cast<std::size_t>(rank - first)].z;
}
const Placement& Saved::placement() const {
  if (empty()) refuse_empty_saved();
  return state_->placement;
}

}  // namespace uniep
