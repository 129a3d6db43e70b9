#include <vector>

#include "api/c_handles.h"
#include "engine/cuda/calls/engine.h"

// The C API's compiling of several calls at once.
using namespace uniep;

uniep_status uniep_compile(const uniep_group* group, const uniep_layer_config* config, int32_t direction,
                           const char* const* schedules, int32_t count, int32_t threads) {
  return guarded([&] {
    require_pointer(group, "group");
    if (count < 0) throw Error(Status::kInvalidArgument, fmt::format("count: {}; must be 0 or more", count));
    if (threads < 0) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("threads: {}; must be 1 or more, or 0 for one a processor", threads));
    }
    if (count > 0) require_pointer(schedules, "schedules");
    const Direction own = checked_constant(direction, Direction::kBackward, "direction");
    const LayerConfig layer = layer_config(config);
    const Machine machine = group->state->group.machine();
    std::vector<cuda::CompiledCall> calls;
    for (int32_t i = 0; i < count; ++i) {
      calls.push_back({layer, machine.ranks, machine.workers, resolved(schedules[i], own, layer, *group->state), own});
    }
    if (machine.engine == EngineKind::kCuda) cuda::compile_calls(calls, threads);
  });
}
