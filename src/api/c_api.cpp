#include "uniep/c_api.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <new>
#include <optional>
#include <span>

#include "api/c_arguments.h"
#include "api/c_handles.h"
#include "api/c_schedules.h"
#include "api/c_struct.h"
#include "api/recording.h"
#include "uniep/uniep.h"

namespace uniep {
namespace {

constexpr bool same(uniep_status c, Status cpp) {
  return static_cast<int>(c) == static_cast<int>(cpp);
}
static_assert(same(UNIEP_OK, Status::kOk) && same(UNIEP_INVALID_ARGUMENT, Status::kInvalidArgument) &&
                  same(UNIEP_UNSUPPORTED, Status::kUnsupported) && same(UNIEP_OVERFLOW, Status::kOverflow) &&
                  same(UNIEP_TIMEOUT, Status::kTimeout) && same(UNIEP_IO, Status::kIo) &&
                  same(UNIEP_OUT_OF_MEMORY, Status::kOutOfMemory) && same(UNIEP_DEVICE, Status::kDevice) &&
                  same(UNIEP_INTERNAL, Status::kInternal),
              "uniep_status holds the values of uniep::Status");
constexpr std::size_t kMessageBytes = 4096;
thread_local char last_error[kMessageBytes] = "";

// Takes no memory: it also reports that there is none.
uniep_status fail(Status status, const char* message) noexcept {
  const int length = std::snprintf(last_error, kMessageBytes, "%s", message);
  if (length >= static_cast<int>(kMessageBytes)) std::snprintf(last_error + kMessageBytes - 4, 4, "...");
  return static_cast<uniep_status>(status);
}

template <typename Call>
uniep_status guarded(Call&& call) noexcept {
  try {
    call();
    return UNIEP_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::kOutOfMemory, "the C++ heap has no room");
  } catch (const std::exception& error) {
    return fail(Status::kInternal, error.what());
  } catch (...) {
    return fail(Status::kInternal, "an exception of an unknown type");
  }
}

void check_index(int64_t value, int64_t begin, int64_t end, const char* name) {
  if (value < begin || value >= end) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: {}; legal are {} to {}", name, value, begin, end - 1));
  }
}

void check_local_rank(int32_t rank, const Group& group) {
  check_index(rank, group.first_local_rank(), group.first_local_rank() + group.local_ranks(), "rank");
}

void check_count(int32_t count, const Group& group) {
  if (count != group.local_ranks()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("count: {}; must be {}, one for each local rank", count, group.local_ranks()));
  }
}

LayerConfig layer_config(const uniep_layer_config* config) {
  const uniep_layer_config given = read_struct<uniep_layer_config>(config, "config");
  return {layer_shape(given), layer_numerics(given)};
}

// One entry a rank, each made by `convert`.
template <typename Given, typename Convert>
auto converted(const Given* given, int32_t count, const char* name, Convert&& convert) {
  std::vector<decltype(convert(Given{}))> ranks;
  for (const Given& own : read_structs<Given>(given, count, name)) ranks.push_back(convert(own));
  return ranks;
}

struct GroupState {
  explicit GroupState(const uniep_group_options& options)
      : allocator{options.allocate, options.release, options.allocator_context},
        group(group_options(options, allocator)) {}

  CallerAllocator allocator;
  Group group;
  ResolvedSchedules schedules;
  std::optional<api::Recording> recording;
};

const Schedule& resolved(const char* schedule, Direction direction, const LayerConfig& layer, GroupState& state,
                         Operation operation = Operation::kLayer) {
  require_pointer(schedule, "schedule");
  return state.schedules.find(schedule, direction, operation, layer, state.group.machine());
}

}  // namespace
}  // namespace uniep

// Each handle keeps the group's state alive, and gives back what is its own first.
struct uniep_group {
  std::shared_ptr<uniep::GroupState> state;
};
struct uniep_placement {
  std::shared_ptr<uniep::GroupState> state;
  uniep::LayerShape shape;
  uniep::Placement placement;
};
struct uniep_saved {
  std::shared_ptr<uniep::GroupState> state;
  uniep::Saved saved;
};
struct uniep_pending {
  std::shared_ptr<uniep::GroupState> state;
  uniep::PendingWeightGradients work;
};
struct uniep_symmetric_buffer {
  std::shared_ptr<uniep::GroupState> state;
  uniep::SymmetricBuffer buffer;
};

using namespace uniep;

const char* uniep_status_name(int status) {
  return status_name(static_cast<Status>(status));
}
const char* uniep_last_error(void) {
  return last_error;
}
int uniep_version(void) {
  return UNIEP_VERSION;
}
const char* uniep_version_string(void) {
  return UNIEP_VERSION_STRING;
}

uniep_status uniep_make_unique_id(char out[128]) {
  return guarded([&] {
    require_pointer(out, "out");
    const std::string id = make_unique_id();
    if (id.size() != UNIEP_UNIQUE_ID_BYTES) throw Error(Status::kInternal, "a unique id of another size");
    std::copy(id.begin(), id.end(), out);
  });
}

uniep_status uniep_use_library(const char* library, const char* path) {
  return guarded([&] {
    require_pointer(library, "library");
    require_pointer(path, "path");
    use_library(library, path);
  });
}

uniep_status uniep_group_create(const uniep_group_options* options, uniep_group** group) {
  return guarded([&] {
    require_pointer(group, "group");
    *group = nullptr;
    const uniep_group_options given = read_struct<uniep_group_options>(options, "options");
    *group = new uniep_group{std::make_shared<GroupState>(given)};
  });
}

void uniep_group_destroy(uniep_group* group) {
  delete group;
}

uniep_status uniep_group_synchronize(uniep_group* group) {
  return guarded([&] {
    require_pointer(group, "group");
    group->state->group.synchronize();
  });
}

uniep_status uniep_group_check(uniep_group* group) {
  return guarded([&] {
    require_pointer(group, "group");
    group->state->group.check();
  });
}

uniep_status uniep_group_memory(const uniep_group* group, int32_t rank, uniep_group_bytes* bytes) {
  return guarded([&] {
    require_pointer(group, "group");
    const std::size_t size = checked_size<uniep_group_bytes>(bytes, "bytes");
    const GroupMemory memory = group->state->group.memory(rank);
    write_struct(uniep_group_bytes{size, memory.symmetric_bytes, memory.workspace_bytes}, bytes, size);
  });
}

uniep_status uniep_group_recover(uniep_group* group) {
  return guarded([&] {
    require_pointer(group, "group");
    group->state->group.recover();
  });
}

void uniep_group_leave(uniep_group* group) {
  if (group != nullptr) group->state->group.leave();
}

void uniep_group_abort(uniep_group* group) {
  if (group != nullptr) group->state->group.abort();
}

uniep_status uniep_group_trim(uniep_group* group) {
  return guarded([&] {
    require_pointer(group, "group");
    group->state->group.trim();
  });
}

uniep_status uniep_group_describe(const uniep_group* group, uniep_group_info* info) {
  return guarded([&] {
    require_pointer(group, "group");
    const std::size_t size = checked_size<uniep_group_info>(info, "info");
    const Group& own = group->state->group;
    uniep_group_info value{};
    value.engine = static_cast<int32_t>(own.engine());
    value.ranks = own.ranks();
    value.workers = own.workers();
    value.first_local_rank = own.first_local_rank();
    value.local_ranks = own.local_ranks();
    write_struct(value, info, size);
  });
}

uniep_status uniep_group_device(const uniep_group* group, int32_t rank, int32_t* device) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(device, "device");
    check_local_rank(rank, group->state->group);
    *device = group->state->group.device(rank);
  });
}

uniep_status uniep_symmetric_allocate(uniep_group* group, size_t bytes, uniep_symmetric_buffer** buffer) {
  return guarded([&] {
    require_pointer(buffer, "buffer");
    *buffer = nullptr;
    require_pointer(group, "group");
    auto handle = std::make_unique<uniep_symmetric_buffer>();
    handle->state = group->state;
    handle->buffer = group->state->group.allocate_symmetric(bytes);
    *buffer = handle.release();
  });
}

uniep_status uniep_symmetric_register(uniep_group* group, void* const* memory, int32_t count, size_t bytes,
                                      uniep_symmetric_buffer** buffer) {
  return guarded([&] {
    require_pointer(buffer, "buffer");
    *buffer = nullptr;
    require_pointer(group, "group");
    require_pointer(memory, "memory");
    Group& own = group->state->group;
    check_count(count, own);
    auto handle = std::make_unique<uniep_symmetric_buffer>();
    handle->state = group->state;
    handle->buffer = own.register_symmetric(std::span(memory, static_cast<std::size_t>(count)), bytes);
    *buffer = handle.release();
  });
}

uniep_status uniep_symmetric_data(const uniep_symmetric_buffer* buffer, int32_t rank, void** data) {
  return guarded([&] {
    require_pointer(buffer, "buffer");
    require_pointer(data, "data");
    check_local_rank(rank, buffer->state->group);
    *data = buffer->buffer.data(rank);
  });
}

void uniep_symmetric_destroy(uniep_symmetric_buffer* buffer) {
  delete buffer;
}

uniep_status uniep_set_activation(uniep_layer_config* config, const char* text) {
  return guarded([&] {
    const std::size_t size = checked_size<uniep_layer_config>(config, "config");
    require_pointer(text, "text");
    constexpr std::size_t kNeeded = offsetof(uniep_layer_config, up_offset) + sizeof(float);
    if (size < kNeeded) {
      throw Error(Status::kInvalidArgument, fmt::format("config.size: {}; must be {} or more", size, kNeeded));
    }
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
    *needed = json.size() + 1;
    if (buffer == nullptr) return;
    if (capacity < *needed) {
      throw Error(Status::kOverflow, fmt::format("capacity: {} bytes; the schedule needs {}", capacity, *needed));
    }
    std::memcpy(buffer, json.c_str(), *needed);
  });
}

uniep_status uniep_place(uniep_group* group, const uniep_layer_config* config, const uniep_routing* routings,
                         int32_t count, const uniep_capacity* capacity, uniep_placement** placement) {
  return guarded([&] {
    require_pointer(placement, "placement");
    *placement = nullptr;
    require_pointer(group, "group");
    const LayerShape shape = layer_shape(read_struct<uniep_layer_config>(config, "config"));
    Capacity limits;
    if (capacity != nullptr) {
      const uniep_capacity given = read_struct<uniep_capacity>(capacity, "capacity");
      limits = {.rows = given.rows, .tokens = given.tokens};
    }
    check_count(count, group->state->group);
    const std::vector<Routing> own = converted(routings, count, "routings", routing);
    auto handle = std::make_unique<uniep_placement>();
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

void query_memory(const uniep_group* group, const uniep_layer_config* config, int32_t direction, const char* schedule,
                  const uniep_placement* placement, const MemoryOptions& options, uniep_memory_need* needs,
                  int32_t count) {
  require_pointer(group, "group");
  require_pointer(placement, "placement");
  const Group& own = group->state->group;
  check_count(count, own);
  const std::size_t stride = checked_stride<uniep_memory_need>(needs, count, "needs");
  const Direction checked_direction = checked_constant(direction, Direction::kBackward, "direction");
  const LayerConfig layer = layer_config(config);
  const Schedule& whole = resolved(schedule, checked_direction, layer, *group->state);
  const std::vector<MemoryNeed> found =
      memory_need(own, layer, whole, checked_direction, placement->placement, options);
  std::byte* out = reinterpret_cast<std::byte*>(needs);
  for (const MemoryNeed& need : found) {
    write_struct(uniep_memory_need{0, need.saved_bytes, need.workspace_bytes, need.symmetric_bytes, need.pending_bytes},
                 out, stride);
    out += stride;
  }
}

}  // namespace

uniep_status uniep_query_memory(const uniep_group* group, const uniep_layer_config* config, int32_t direction,
                                const char* schedule, const uniep_placement* placement, uniep_memory_need* needs,
                                int32_t count) {
  return guarded([&] { query_memory(group, config, direction, schedule, placement, {}, needs, count); });
}

uniep_status uniep_query_forward_memory(const uniep_group* group, const uniep_layer_config* config,
                                        const char* schedule, const uniep_placement* placement, int32_t keep_saved,
                                        uniep_memory_need* needs, int32_t count) {
  return guarded([&] {
    MemoryOptions options;
    options.keep_saved = checked_flag(keep_saved, "keep_saved");
    query_memory(group, config, UNIEP_FORWARD, schedule, placement, options, needs, count);
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
    query_memory(group, config, UNIEP_BACKWARD, schedule, placement, options, needs, count);
  });
}

uniep_status uniep_forward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                           const uniep_placement* placement, const uniep_forward_arguments* arguments, int32_t count,
                           uniep_saved** saved) {
  return guarded([&] {
    if (saved != nullptr) *saved = nullptr;
    require_pointer(group, "group");
    require_pointer(placement, "placement");
    Group& own = group->state->group;
    check_count(count, own);
    const LayerConfig layer = layer_config(config);
    const Schedule& whole = resolved(schedule, Direction::kForward, layer, *group->state);
    const std::vector<ForwardArguments> ranks = converted(arguments, count, "arguments", forward_arguments);
    std::unique_ptr<uniep_saved> handle;
    if (saved != nullptr) handle = std::make_unique<uniep_saved>();
    CallOptions options;
    options.keep_saved = saved != nullptr;
    api::RecordedCall recorded(group->state->recording, "forward", options);
    Saved kept = forward(own, layer, whole, placement->placement, ranks, options);
    recorded.keep();
    if (saved == nullptr) return;
    handle->state = group->state;
    handle->saved = std::move(kept);
    *saved = handle.release();
  });
}

uniep_status uniep_saved_attach(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                const uniep_placement* placement, void* const* memory, const size_t* bytes,
                                int32_t count, uniep_saved** saved) {
  return guarded([&] {
    require_pointer(saved, "saved");
    *saved = nullptr;
    require_pointer(group, "group");
    require_pointer(placement, "placement");
    require_pointer(memory, "memory");
    require_pointer(bytes, "bytes");
    Group& own = group->state->group;
    check_count(count, own);
    const LayerConfig layer = layer_config(config);
    const Schedule& whole = resolved(schedule, Direction::kForward, layer, *group->state);
    std::vector<CallerMemory> ranks;
    for (int32_t i = 0; i < count; ++i) ranks.push_back({memory[i], bytes[i]});
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

namespace {

PendingWeightGradients run_backward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                    const uniep_saved* saved, const uniep_backward_arguments* arguments, int32_t count,
                                    bool may_be_later) {
  require_pointer(group, "group");
  require_pointer(saved, "saved");
  Group& own = group->state->group;
  check_count(count, own);
  const LayerConfig layer = layer_config(config);
  const Schedule& whole = resolved(schedule, Direction::kBackward, layer, *group->state);
  const std::vector<BackwardArguments> ranks = converted(arguments, count, "arguments", backward_arguments);
  for (const BackwardArguments& rank : ranks) {
    if (may_be_later || rank.weight_gradients != WeightGradientTime::kLater) continue;
    throw Error(Status::kInvalidArgument, "weight_gradients: later (1) is for uniep_backward_pending()");
  }
  CallOptions options;
  api::RecordedCall recorded(group->state->recording, "backward", options);
  PendingWeightGradients left = backward(own, layer, whole, saved->saved, ranks, options);
  recorded.keep();
  return left;
}

}  // namespace

uniep_status uniep_backward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                            const uniep_saved* saved, const uniep_backward_arguments* arguments, int32_t count) {
  return guarded([&] { run_backward(group, config, schedule, saved, arguments, count, false); });
}

uniep_status uniep_backward_pending(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                    const uniep_saved* saved, const uniep_backward_arguments* arguments, int32_t count,
                                    uniep_pending** pending) {
  return guarded([&] {
    require_pointer(pending, "pending");
    *pending = nullptr;
    auto handle = std::make_unique<uniep_pending>();
    handle->work = run_backward(group, config, schedule, saved, arguments, count, true);
    if (handle->work.empty()) return;
    handle->state = group->state;
    *pending = handle.release();
  });
}

void uniep_pending_destroy(uniep_pending* pending) {
  delete pending;
}

uniep_status uniep_weight_gradients(uniep_group* group, const uniep_pending* pending,
                                    const uniep_weight_gradient_arguments* arguments, int32_t count) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(pending, "pending");
    Group& own = group->state->group;
    check_count(count, own);
    weight_gradients(own, pending->work, converted(arguments, count, "arguments", weight_gradient_arguments));
  });
}

namespace {

// dispatch() or combine(), as `run` is; `convert` makes a rank's arguments of what the caller gave.
template <typename Given, typename Convert, typename Run>
uniep_status exchange(Operation operation, uniep_group* group, const uniep_layer_config* config, const char* schedule,
                      const uniep_placement* placement, const Given* arguments, int32_t count, Convert&& convert,
                      Run&& run) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(placement, "placement");
    Group& own = group->state->group;
    check_count(count, own);
    const LayerConfig layer = layer_config(config);
    const Schedule& whole = resolved(schedule, Direction::kForward, layer, *group->state, operation);
    run(own, layer, whole, placement->placement, converted(arguments, count, "arguments", convert));
  });
}

}  // namespace

uniep_status uniep_dispatch(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                            const uniep_placement* placement, const uniep_dispatch_arguments* arguments,
                            int32_t count) {
  return exchange(Operation::kDispatch, group, config, schedule, placement, arguments, count, dispatch_arguments,
                  dispatch);
}

uniep_status uniep_combine(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                           const uniep_placement* placement, const uniep_combine_arguments* arguments, int32_t count) {
  return exchange(Operation::kCombine, group, config, schedule, placement, arguments, count, combine_arguments,
                  combine);
}

uniep_status uniep_trace_begin(uniep_group* group) {
  return guarded([&] {
    require_pointer(group, "group");
    group->state->recording.emplace();
  });
}

uniep_status uniep_trace_end(uniep_group* group, const char* path) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(path, "path");
    std::optional<api::Recording>& recording = group->state->recording;
    if (!recording.has_value()) {
      throw Error(Status::kInvalidArgument, "group: nothing is recorded; call uniep_trace_begin() first");
    }
    const api::Recording ended = std::move(*recording);
    recording.reset();
    api::write_recording(ended, path);
  });
}

namespace uniep {

std::shared_ptr<Group> group_of(const uniep_group& handle) {
  return {handle.state, &handle.state->group};
}
const Saved& saved_of(const uniep_saved& handle) {
  return handle.saved;
}
uniep_status guarded_call(const std::function<void()>& call) noexcept {
  return guarded(call);
}

}  // namespace uniep
