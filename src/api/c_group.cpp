#include <algorithm>

#include "api/c_handles.h"

// The C API's groups, and symmetric memory.
using namespace uniep;

uniep_status uniep_make_unique_id(char out[128]) {
  return guarded([&] {
    require_pointer(out, "out");
    const std::string id = make_unique_id();
    if (id.size() != UNIEP_UNIQUE_ID_BYTES) throw Error(Status::kInternal, "a unique id of another size");
    std::copy(id.begin(), id.end(), out);
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

void uniep_set_memory_reclaimer(void (*reclaim)(void* context, int32_t device), void* context) {
  set_memory_reclaimer(reclaim, context);
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
    if (buffer != nullptr) *buffer = nullptr;
    require_pointer(group, "group");
    std::unique_ptr<uniep_symmetric_buffer> handle;
    api::before_collective(group->state->group, [&] {
      require_pointer(buffer, "buffer");
      handle = std::make_unique<uniep_symmetric_buffer>();
    });
    handle->state = group->state;
    handle->buffer = group->state->group.allocate_symmetric(bytes);
    *buffer = handle.release();
  });
}

uniep_status uniep_symmetric_register(uniep_group* group, void* const* memory, int32_t count, size_t bytes,
                                      uniep_symmetric_buffer** buffer) {
  return guarded([&] {
    if (buffer != nullptr) *buffer = nullptr;
    require_pointer(group, "group");
    Group& own = group->state->group;
    std::unique_ptr<uniep_symmetric_buffer> handle;
    api::before_collective(own, [&] {
      require_pointer(buffer, "buffer");
      require_pointer(memory, "memory");
      check_count(count, own);
      handle = std::make_unique<uniep_symmetric_buffer>();
    });
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
