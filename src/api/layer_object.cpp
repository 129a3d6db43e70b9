#include "uniep/layer_object.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "api/check_call.h"
#include "model/place.h"
#include "model/refuse.h"

namespace uniep {
namespace {

const char* name_of(Direction direction) {
  return direction == Direction::kForward ? "forward" : "backward";
}

void check_schedule(const Group& group, const LayerConfig& config, Direction direction, const Schedule& schedule) {
  const std::vector<std::string> violations = validate(
      schedule,
      {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = group.machine()});
  if (!violations.empty()) refuse(fmt::format("{} schedule: {}", name_of(direction), fmt::join(violations, "; ")));
}

}  // namespace

Layer::Layer(Group& group, const LayerShape& shape, const LayerOptions& options)
    : group_(&group), config_{shape, options.numerics}, capacity_(options.capacity) {
  check_shape(shape, group.ranks());
  const auto set = [&](Direction direction, const PartialSchedule& given) {
    set_schedule(
        direction,
        fill(given,
             {.direction = direction, .shape = shape, .numerics = options.numerics, .machine = group.machine()}));
  };
  set(Direction::kForward, options.forward);
  const bool keeps = schedule(Direction::kForward).save_xg == SaveXg::kKeep;
  const bool keeps_z = schedule(Direction::kForward).save_z == SaveZ::kKeep;
  PartialSchedule backward = options.backward;
  if (!backward.given("save.xg")) backward.set("save.xg", keeps ? "keep" : "redispatch");
  if (!backward.given("save.z")) backward.set("save.z", keeps_z ? "keep" : "recompute");
  set(Direction::kBackward, backward);
  if (!keeps && schedule(Direction::kBackward).save_xg == SaveXg::kKeep) {
    refuse("backward schedule: save.xg=keep needs a forward that keeps xg; the forward's is redispatch");
  }
  if (!keeps_z && schedule(Direction::kBackward).save_z == SaveZ::kKeep) {
    refuse("backward schedule: save.z=keep needs a forward that keeps z; the forward's is recompute");
  }
}

void Layer::set_schedule(Direction direction, const Schedule& schedule) {
  check_schedule(*group_, config_, direction, schedule);
  schedules_[static_cast<int>(direction)] = schedule;
}

Placement Layer::place(std::span<const Routing> routings) const {
  return uniep::place(*group_, config_.shape, routings, capacity_);
}

Saved Layer::forward(const Placement& placement, std::span<const ForwardArguments> arguments,
                     const CallOptions& options) const {
  return uniep::forward(*group_, config_, schedule(Direction::kForward), placement, arguments, options);
}

PendingWeightGradients Layer::backward(const Saved& saved, std::span<const BackwardArguments> arguments,
                                       const CallOptions& options) const {
  return uniep::backward(*group_, config_, schedule(Direction::kBackward), saved, arguments, options);
}

void Layer::weight_gradients(const PendingWeightGradients& work,
                             std::span<const WeightGradientArguments> arguments) const {
  uniep::weight_gradients(*group_, work, arguments);
}

Saved Layer::attach_saved(const Placement& placement, std::span<const CallerMemory> memory) const {
  return uniep::attach_saved(*group_, config_, schedule(Direction::kForward), placement, memory);
}

std::vector<MemoryNeed> Layer::memory_need(const Placement& placement, const MemoryOptions& options) const {
  return uniep::memory_need(*group_, config_, schedule(options.direction), placement, options);
}

Placement Layer::place(const Routing& routing) const {
  return place(std::span(&routing, 1));
}
Saved Layer::forward(const Placement& placement, const ForwardArguments& arguments, const CallOptions& options) const {
  return forward(placement, std::span(&arguments, 1), options);
}
PendingWeightGradients Layer::backward(const Saved& saved, const BackwardArguments& arguments,
                                       const CallOptions& options) const {
  return backward(saved, std::span(&arguments, 1), options);
}
void Layer::weight_gradients(const PendingWeightGradients& work, const WeightGradientArguments& arguments) const {
  weight_gradients(work, std::span(&arguments, 1));
}
Saved Layer::attach_saved(const Placement& placement, const CallerMemory& memory) const {
  return attach_saved(placement, std::span(&memory, 1));
}

}  // namespace uniep
