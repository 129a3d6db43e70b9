#include "api/c_handles.h"

// The C API's dispatch and combine alone.
using namespace uniep;

namespace {

// dispatch() or combine(), as `run` is; `convert` makes a rank's arguments of what the caller gave.
template <typename Given, typename Convert, typename Run>
uniep_status exchange(Operation operation, uniep_group* group, const uniep_layer_config* config, const char* schedule,
                      const uniep_placement* placement, const Given* arguments, int32_t count, Convert&& convert,
                      Run&& run) {
  return guarded([&] {
    require_pointer(group, "group");
    Group& own = group->state->group;
    LayerConfig layer;
    const Schedule* whole = nullptr;
    decltype(converted(arguments, count, "arguments", convert)) ranks;
    api::before_collective(own, [&] {
      require_pointer(placement, "placement");
      check_count(count, own);
      layer = layer_config(config);
      whole = &resolved(schedule, Direction::kForward, layer, *group->state, operation);
      ranks = converted(arguments, count, "arguments", convert);
    });
    run(own, layer, *whole, placement->placement, ranks);
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
