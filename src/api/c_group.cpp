#include <algorithm>
#include <cstdio>

#include "api/c_handles.h"

// The C API's errors, and its groups with what belongs to them.
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

}  // namespace

uniep_status fail(Status status, const char* message) noexcept {
  const int length = std::snprintf(last_error, kMessageBytes, "%s", message);
  if (length >= static_cast<int>(kMessageBytes)) std::snprintf(last_error + kMessageBytes - 4, 4, "...");
  return static_cast<uniep_status>(status);
}

}  // namespace uniep

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
