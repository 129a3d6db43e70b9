#include "api/c_handles.h"
#include "uniep/call_timer.h"

using namespace uniep;

// Does not keep the group alive: a job may keep timers for as long as it runs.
struct uniep_timer {
  std::weak_ptr<GroupState> state;
  std::shared_ptr<CallTimer> timer;
};

uniep_status uniep_timer_create(uniep_group* group, uniep_timer** timer) {
  return guarded([&] {
    require_pointer(timer, "timer");
    *timer = nullptr;
    require_pointer(group, "group");
    auto handle = std::make_unique<uniep_timer>();
    handle->state = group->state;
    handle->timer = std::make_shared<CallTimer>(group->state->group);
    *timer = handle.release();
  });
}

void uniep_timer_destroy(uniep_timer* timer) {
  delete timer;
}

uniep_status uniep_timer_start(uniep_timer* timer) {
  return guarded([&] {
    require_pointer(timer, "timer");
    const std::shared_ptr<GroupState> state = timer->state.lock();
    if (state == nullptr) throw Error(Status::kInvalidArgument, "timer: its group has been destroyed");
    state->next_timer = timer->timer;
  });
}

uniep_status uniep_timer_read(const uniep_timer* timer, int32_t rank, uniep_call_times* times) {
  return guarded([&] {
    require_pointer(timer, "timer");
    const std::size_t size = checked_size<uniep_call_times>(times, "times");
    uniep_call_times read{};
    read.size = size;
    const std::optional<CallTimes> known = timer->timer->times(rank);
    if (known.has_value()) {
      read.state = UNIEP_TIMES_KNOWN;
      read.exposed_dispatch_ms = known->exposed_dispatch_ms;
      read.sum_ms = known->sum_ms;
      read.wait_ms = known->wait_ms;
      read.call_ms = known->call_ms;
      read.runs = known->runs;
    } else {
      read.state = timer->timer->is_over() ? UNIEP_TIMES_LOST : UNIEP_TIMES_NOT_YET;
    }
    write_struct(read, times, size);
  });
}
