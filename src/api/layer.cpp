#include "uniep/layer.h"

#include <fmt/format.h>

#include "api/check_call.h"
#include "engine/engine.h"

namespace uniep {

using api::check_array;
using api::check_call;
using api::collective;
using api::refuse;

namespace {

void check_expert_arrays(const void* whole, const void* const* experts, const char* name, int rank, int64_t count) {
  if (experts == nullptr) return check_array(whole, name, rank, true);
  for (int64_t expert = 0; expert < count; ++expert) {
    if (experts[expert] == nullptr) refuse(fmt::format("{}: null for local expert {} on rank {}", name, expert, rank));
  }
}

void check_weights(const Weights& weights, int rank, int64_t local_experts) {
  check_expert_arrays(weights.w1, reinterpret_cast<const void* const*>(weights.w1_experts), "w1", rank, local_experts);
  check_expert_arrays(weights.w2, reinterpret_cast<const void* const*>(weights.w2_experts), "w2", rank, local_experts);
}

}  // namespace

Placement place(Group& group, const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) {
  return collective(group, [&] { return group.implementation().place(shape, routings, capacity); });
}

std::vector<MemoryNeed> memory_need(const Group& group, const LayerConfig& config, const Schedule& schedule,
                                    Direction direction, const Placement& placement) {
  check_call(group, config, schedule, direction, placement, group.local_ranks());
  return group.implementation().memory_need(config, schedule, direction, placement);
}

Saved forward(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
              std::span<const ForwardArguments> arguments, const CallOptions& options) {
  return collective(group, [&] {
    check_call(group, config, schedule, Direction::kForward, placement, arguments.size());
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const int rank = group.first_local_rank() + static_cast<int>(i);
      const bool has_tokens = placement.tokens(rank) > 0;
      check_array(arguments[i].x, "x", rank, has_tokens);
      check_array(arguments[i].y, "y", rank, has_tokens);
      check_weights(arguments[i].weights, rank, config.shape.experts / group.ranks());
    }
    return group.implementation().forward({config, schedule, placement, arguments, options});
  });
}

void backward(Group& group, const LayerConfig& config, const Schedule& schedule, const Saved& saved,
              std::span<const BackwardArguments> arguments, const CallOptions& options) {
  collective(group, [&] {
    if (saved.empty()) refuse("saved: empty; it comes from forward()");
    const internal::SavedState& state = saved.state();
    check_call(group, config, schedule, Direction::kBackward, state.placement, arguments.size());
    const bool keep = schedule.save_xg == SaveXg::kKeep;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const int rank = group.first_local_rank() + static_cast<int>(i);
      const bool has_tokens = state.placement.tokens(rank) > 0;
      const BackwardArguments& own = arguments[i];
      if (keep && state.ranks[i].xg == nullptr && state.placement.padded_rows(rank) > 0) {
        refuse("save.xg: keep in backward needs a forward that kept xg; that one ran with redispatch");
      }
      check_array(own.dy, "dy", rank, has_tokens);
      check_array(own.x, "x (save.xg = redispatch)", rank, has_tokens && !keep);
      check_array(own.dx, "dx", rank, has_tokens);
      check_array(own.dprobs, "dprobs", rank, has_tokens);
      check_weights(own.weights, rank, config.shape.experts / group.ranks());
      check_expert_arrays(own.gradients.dw1, own.gradients.dw1_experts, "dw1", rank,
                          config.shape.experts / group.ranks());
      check_expert_arrays(own.gradients.dw2, own.gradients.dw2_experts, "dw2", rank,
                          config.shape.experts / group.ranks());
    }
    group.implementation().backward({config, schedule, saved, arguments, options});
  });
}

const BFloat16* Saved::z(int rank) const {
  return state_->ranks.at(rank - state_->first_rank).z;
}
const Placement& Saved::placement() const {
  return state_->placement;
}

}  // namespace uniep
