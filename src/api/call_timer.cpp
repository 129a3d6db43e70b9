#include "uniep/call_timer.h"

#include <fmt/format.h>

#include "engine/call_timer_state.h"
#include "engine/engine.h"

namespace uniep {

CallTimer::CallTimer(Group& group) : state_(std::make_shared<internal::CallTimerState>()) {
  internal::Engine& engine = group.implementation();
  state_->owner = engine.number();
  state_->first_rank = engine.first_local_rank();
  state_->count = engine.local_ranks();
  state_->ranks = engine.timer_memory();
}

bool CallTimer::is_over() const {
  return state_->is_over();
}

std::optional<CallTimes> CallTimer::times(int rank) const {
  const int local = rank - state_->first_rank;
  if (local < 0 || local >= state_->count) {
    throw Error(Status::kInvalidArgument, fmt::format("rank: {}; legal are {} to {}", rank, state_->first_rank,
                                                      state_->first_rank + state_->count - 1));
  }
  const std::optional<internal::RankTimes> own = state_->read(local);
  if (!own.has_value() || own->lost != 0) return std::nullopt;
  constexpr double kMs = 1e-6;
  CallTimes times;
  if (own->workers > 0) times.exposed_dispatch_ms = kMs * static_cast<double>(own->first_waits_ns) / own->workers;
  times.sum_ms = kMs * static_cast<double>(own->sum_ns);
  times.wait_ms = times.exposed_dispatch_ms + kMs * static_cast<double>(own->arrival_ns);
  times.call_ms = kMs * static_cast<double>(own->call_ns);
  times.runs = own->runs;
  return times;
}

}  // namespace uniep
