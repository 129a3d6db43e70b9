#pragma once

#include <array>
#include <span>

#include "uniep/export.h"
#include "uniep/layer.h"

namespace uniep {

// What a Layer is beside its sizes, equal on all ranks.
struct LayerOptions {
  Numerics numerics{};
  // What they leave open is filled for the group's machine, as resolve() does; the backward's save.xg and save.z as the
  // forward's.
  PartialSchedule forward{}, backward{};
  Capacity capacity{};  // of place()
};

// One MoE layer of a model on a Group: what stays the same from call to call, beside the functions of layer.h. Weights,
// saved state and placement are the caller's, so that one Layer serves all layers of a model that are alike, and any
// number of micro-batches:
//
//   const uniep::Layer layer(group, {.hidden = 2048, .intermediate = 768, .experts = 128, .topk = 8});
//   const uniep::Placement placement = layer.place({.tokens = tokens, .topk_ids = ids, .probs = probs});
//   const uniep::Saved saved = layer.forward(placement, {.x = x, .weights = weights, .y = y});
//   layer.backward(saved, {.dy = dy, .weights = weights, .dx = dx, .dprobs = dprobs, .gradients = {dw1, dw2}});
//
// A call takes the arguments of the one rank that this process holds, or a span with those of each local rank, in rank
// order. Whose count differs from the local ranks' is Error(kInvalidArgument). Calls are those of layer.h: what these
// say of collective calls, errors and memory holds here, too. Cheap to copy; `group` must outlive it.
class UNIEP_API Layer {
 public:
  // Throws Error(kInvalidArgument) that names the size, the Numerics or the field of a Schedule that is not legal on
  // this group.
  Layer(Group& group, const LayerShape& shape, const LayerOptions& options = {});

  Placement place(const Routing& routing) const;
  Placement place(std::span<const Routing> routings) const;

  Saved forward(const Placement& placement, const ForwardArguments& arguments, const CallOptions& options = {}) const;
  Saved forward(const Placement& placement, std::span<const ForwardArguments> arguments,
                const CallOptions& options = {}) const;

  // `saved` is of a forward of a Layer of the same group, sizes and activation.
  PendingWeightGradients backward(const Saved& saved, const BackwardArguments& arguments,
                                  const CallOptions& options = {}) const;
  PendingWeightGradients backward(const Saved& saved, std::span<const BackwardArguments> arguments,
                                  const CallOptions& options = {}) const;

  void weight_gradients(const PendingWeightGradients& work, const WeightGradientArguments& arguments) const;
  void weight_gradients(const PendingWeightGradients& work, std::span<const WeightGradientArguments> arguments) const;

  Saved attach_saved(const Placement& placement, const CallerMemory& memory) const;
  Saved attach_saved(const Placement& placement, std::span<const CallerMemory> memory) const;

  // Of each local rank.
  std::vector<MemoryNeed> memory_need(const Placement& placement, const MemoryOptions& options = {}) const;

  Group& group() const { return *group_; }
  const LayerConfig& config() const { return config_; }
  const Capacity& capacity() const { return capacity_; }
  const Schedule& schedule(Direction direction) const { return schedules_[static_cast<int>(direction)]; }
  // For the calls from here on, say one that a Tuner gives. Throws Error(kInvalidArgument) for what is not legal, and
  // keeps the earlier one. It is the caller's that forwards save what later backwards read (save.xg, save.z).
  void set_schedule(Direction direction, const Schedule& schedule);

 private:
  Group* group_;
  LayerConfig config_;
  Capacity capacity_;
  std::array<Schedule, 2> schedules_;  // by Direction
};

}  // namespace uniep
