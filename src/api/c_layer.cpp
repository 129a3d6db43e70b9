#include <utility>

#include "api/c_handles.h"

// The C API's placements, forwards and backwards.
using namespace uniep;
using api::before_collective;

uniep_status uniep_set_activation(uniep_layer_config* config, const char* text) {
  return guarded([&] {
    checked_size<uniep_layer_config>(config, "config");
    require_pointer(text, "text");
    Numerics numerics;
    set_activation(numerics, text);
    config->activation = static_cast<int32_t>(numerics.activation);
    config->alpha = numerics.alpha;
    config->gate_limit = numerics.gate_limit;
    config->up_limit = numerics.up_limit;
    config->up_offset = numerics.up_offset;
  });
}

uniep_status uniep_schedule_resolve(const uniep_group* group, const uniep_layer_config* config, int32_t direction,
                                    const char* schedule, char* buffer, size_t capacity, size_t* needed) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(needed, "needed");
    if (capacity > 0) require_pointer(buffer, "buffer");
    const Direction checked_direction = checked_constant(direction, Direction::kBackward, "direction");
    const std::string json = to_json(resolved(schedule, checked_direction, layer_config(config), *group->state));
    put_text(json, "the schedule needs", buffer, capacity, needed);
  });
}

uniep_status uniep_place(uniep_group* group, const uniep_layer_config* config, const uniep_routing* routings,
                         int32_t count, const uniep_capacity* capacity, uniep_placement** placement) {
  return guarded([&] {
    if (placement != nullptr) *placement = nullptr;
    require_pointer(group, "group");
    LayerShape shape;
    Capacity limits;
    std::vector<Routing> own;
    std::unique_ptr<uniep_placement> handle;
    before_collective(group->state->group, [&] {
      require_pointer(placement, "placement");
      shape = layer_shape(read_struct<uniep_layer_config>(config, "config"));
      if (capacity != nullptr) {
        const uniep_capacity given = read_struct<uniep_capacity>(capacity, "capacity");
        limits = {.rows = given.rows, .tokens = given.tokens};
      }
      check_count(count, group->state->group);
      own = converted(routings, count, "routings", routing);
      handle = std::make_unique<uniep_placement>();
    });
    handle->state = group->state;
    handle->shape = shape;
    handle->placement = place(group->state->group, shape, own, limits);
    *placement = handle.release();
  });
}

void uniep_placement_destroy(uniep_placement* placement) {
  delete placement;
}

uniep_status uniep_placement_rank(const uniep_placement* placement, int32_t rank, uniep_rank_rows* rows) {
  return guarded([&] {
    require_pointer(placement, "placement");
    const std::size_t size = checked_size<uniep_rank_rows>(rows, "rows");
    check_index(rank, 0, placement->state->group.ranks(), "rank");
    const Placement& own = placement->placement;
    write_struct(uniep_rank_rows{0, own.tokens(rank), own.rows(rank), own.padded_rows(rank)}, rows, size);
  });
}

uniep_status uniep_placement_expert(const uniep_placement* placement, int64_t expert, uniep_expert_rows* rows) {
  return guarded([&] {
    require_pointer(placement, "placement");
    const std::size_t size = checked_size<uniep_expert_rows>(rows, "rows");
    check_index(expert, 0, placement->shape.experts, "expert");
    const Placement& own = placement->placement;
    write_struct(uniep_expert_rows{0, own.expert_rows(expert), own.expert_segment(expert)}, rows, size);
  });
}

namespace {

void query_memory(const uniep_group* group, const uniep_layer_config* config, const char* schedule,
                  const uniep_placement* placement, const MemoryOptions& options, uniep_memory_need* needs,
                  int32_t count) {
  require_pointer(group, "group");
  require_pointer(placement, "placement");
  const Group& own = group->state->group;
  check_count(count, own);
  const std::size_t stride = checked_stride<uniep_memory_need>(needs, count, "needs");
  const LayerConfig layer = layer_config(config);
  const Schedule& whole = resolved(schedule, options.direction, layer, *group->state);
  const std::vector<MemoryNeed> found = memory_need(own, layer, whole, placement->placement, options);
  std::byte* out = reinterpret_cast<std::byte*>(needs);
  for (const MemoryNeed& need : found) {
    write_struct(uniep_memory_need{0, need.saved_bytes, need.workspace_bytes, need.symmetric_bytes, need.pending_bytes},
                 out, stride);
    out += stride;
  }
}

}  // namespace

uniep_status uniep_query_forward_memory(const uniep_group* group, const uniep_layer_config* config,
                                        const char* schedule, const uniep_placement* placement, int32_t keep_saved,
                                        uniep_memory_need* needs, int32_t count) {
  return guarded([&] {
    MemoryOptions options;
    options.keep_saved = checked_flag(keep_saved, "keep_saved");
    query_memory(group, config, schedule, placement, options, needs, count);
  });
}

uniep_status uniep_query_backward_memory(const uniep_group* group, const uniep_layer_config* config,
                                         const char* schedule, const uniep_placement* placement,
                                         int32_t weight_gradients, int32_t last_use, uniep_memory_need* needs,
                                         int32_t count) {
  return guarded([&] {
    MemoryOptions options;
    options.weight_gradients = checked_constant(weight_gradients, WeightGradientTime::kNone, "weight_gradients");
    options.last_use = checked_flag(last_use, "last_use");
    options.direction = Direction::kBackward;
    query_memory(group, config, schedule, placement, options, needs, count);
  });
}

uniep_status uniep_forward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                           const uniep_placement* placement, const uniep_forward_arguments* arguments, int32_t count,
                           uniep_saved** saved) {
  return guarded([&] {
    if (saved != nullptr) *saved = nullptr;
    require_pointer(group, "group");
    Group& own = group->state->group;
    LayerConfig layer;
    const Schedule* whole = nullptr;
    std::vector<ForwardArguments> ranks;
    std::unique_ptr<uniep_saved> handle;
    before_collective(own, [&] {
      require_pointer(placement, "placement");
      check_count(count, own);
      layer = layer_config(config);
      whole = &resolved(schedule, Direction::kForward, layer, *group->state);
      ranks = converted(arguments, count, "arguments", forward_arguments);
      if (saved != nullptr) handle = std::make_unique<uniep_saved>();
    });
    CallOptions options;
    options.keep_saved = saved != nullptr;
    const std::shared_ptr<CallTimer> timer = std::exchange(group->state->next_timer, nullptr);
    options.timer = timer.get();
    api::RecordedCall recorded(group->state->recording, "forward", options);
    Saved kept = forward(own, layer, *whole, placement->placement, ranks, options);
    recorded.keep();
    if (saved == nullptr) return;
    handle->state = group->state;
    handle->saved = std::move(kept);
    *saved = handle.release();
  });
}

uniep_status uniep_saved_attach(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                const uniep_placement* placement, const uniep_caller_memory* memory, int32_t count,
                                uniep_saved** saved) {
  return guarded([&] {
    require_pointer(saved, "saved");
    *saved = nullptr;
    require_pointer(group, "group");
    require_pointer(placement, "placement");
    require_pointer(memory, "memory");
    Group& own = group->state->group;
    check_count(count, own);
    const LayerConfig layer = layer_config(config);
    const Schedule& whole = resolved(schedule, Direction::kForward, layer, *group->state);
    std::vector<CallerMemory> ranks;
    for (int32_t i = 0; i < count; ++i) ranks.push_back(caller_memory(memory[i]));
    auto handle = std::make_unique<uniep_saved>();
    handle->state = group->state;
    handle->saved = attach_saved(own, layer, whole, placement->placement, ranks);
    *saved = handle.release();
  });
}

void uniep_saved_destroy(uniep_saved* saved) {
  delete saved;
}

uniep_status uniep_saved_z(const uniep_saved* saved, int32_t rank, const void** z) {
  return guarded([&] {
    require_pointer(saved, "saved");
    require_pointer(z, "z");
    check_local_rank(rank, saved->state->group);
    *z = saved->saved.z(rank);
  });
}

uniep_status uniep_backward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                            const uniep_saved* saved, const uniep_backward_arguments* arguments, int32_t count,
                            uniep_pending** pending) {
  return guarded([&] {
    if (pending != nullptr) *pending = nullptr;
    require_pointer(group, "group");
    Group& own = group->state->group;
    LayerConfig layer;
    const Schedule* whole = nullptr;
    std::vector<BackwardArguments> ranks;
    std::unique_ptr<uniep_pending> handle;
    before_collective(own, [&] {
      require_pointer(saved, "saved");
      check_count(count, own);
      layer = layer_config(config);
      whole = &resolved(schedule, Direction::kBackward, layer, *group->state);
      ranks = converted(arguments, count, "arguments", backward_arguments);
      for (const BackwardArguments& rank : ranks) {
        if (rank.weight_gradients != WeightGradientTime::kLater) continue;
        require_pointer(pending, "pending");
        if (handle == nullptr) handle = std::make_unique<uniep_pending>();
      }
    });
    CallOptions options;
    const std::shared_ptr<CallTimer> timer = std::exchange(group->state->next_timer, nullptr);
    options.timer = timer.get();
    api::RecordedCall recorded(group->state->recording, "backward", options);
    PendingWeightGradients left = backward(own, layer, *whole, saved->saved, ranks, options);
    recorded.keep();
    if (left.empty()) return;
    handle->state = group->state;
    handle->work = std::move(left);
    *pending = handle.release();
  });
}

void uniep_pending_destroy(uniep_pending* pending) {
  delete pending;
}

uniep_status uniep_make_weight_gradients(uniep_group* group, const uniep_pending* pending,
                                         const uniep_weight_gradient_arguments* arguments, int32_t count) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(pending, "pending");
    Group& own = group->state->group;
    check_count(count, own);
    weight_gradients(own, pending->work, converted(arguments, count, "arguments", weight_gradient_arguments));
  });
}
