#pragma once

#include <fmt/format.h>

#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "api/c_arguments.h"
#include "api/c_schedules.h"
#include "api/c_struct.h"
#include "api/check_call.h"
#include "api/recording.h"
#include "model/refuse.h"
#include "uniep/c_api.h"
#include "uniep/uniep.h"

// What the C API's files share: its handles, and how an exception becomes a status.
namespace uniep {

// Keeps the message for uniep_last_error(). Takes no memory: it also reports that there is none.
uniep_status fail(Status status, const char* message) noexcept;

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

inline void check_local_rank(int32_t rank, const Group& group) {
  check_index(rank, group.first_local_rank(), group.first_local_rank() + group.local_ranks(), "rank");
}

inline void check_count(int32_t count, const Group& group) {
  if (count != group.local_ranks()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("count: {}; must be {}, one for each local rank", count, group.local_ranks()));
  }
}

inline LayerConfig layer_config(const uniep_layer_config* config) {
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
  std::shared_ptr<CallTimer> next_timer;  // of the next forward or backward; or null
};

inline const Schedule& resolved(const char* schedule, Direction direction, const LayerConfig& layer, GroupState& state,
                                Operation operation = Operation::kLayer) {
  require_pointer(schedule, "schedule");
  return state.schedules.find(schedule, direction, operation, layer, state.group.machine());
}

}  // namespace uniep

// Each handle but a timer keeps the group's state alive, and gives back what is its own first.
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
