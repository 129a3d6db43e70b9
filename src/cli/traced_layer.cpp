#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "cli/traced_run.h"
#include "engine/cuda/calls/engine.h"

namespace uniep::cli {

TracedMachine traced_machine(const Group& group) {
  TracedMachine machine;
  machine.engine = engine_name(group.engine());
  machine.workers = group.workers();
  if (group.engine() != EngineKind::kCuda) return machine;
  std::set<int> devices;
  const int first = group.first_local_rank(), local = group.local_ranks();
  for (int rank = first; rank < first + local; ++rank) devices.insert(group.device(rank));
  machine.device = cuda::device_label(group.device(first));
  machine.compute_units = cuda::compute_units(group.device(first));
  machine.gpus = local == group.ranks() ? static_cast<int>(devices.size()) : group.ranks();
  return machine;
}

TracedLayer traced_layer(const LayerOptions& layer, const Schedule& schedule, const TracedMachine& machine,
                         std::optional<sim::State> state) {
  TracedLayer traced{layer.shape, schedule};
  const Numerics& numerics = layer.numerics;
  traced.more = {{"engine", machine.engine},
                 {"device", machine.device},
                 {"gpus", std::to_string(machine.gpus)},
                 {"compute_units", std::to_string(machine.compute_units)},
                 {"workers", std::to_string(machine.workers)},
                 {"tokens", fmt::format("{}", fmt::join(layer.tokens(), ","))},
                 {"routing", layer.routing_is_file() ? kRoutingFromFile : layer.routing},
                 {"seed", std::to_string(layer.seed)},
                 {"activation", activation_text(numerics)},
                 {"router_weight", router_weight_text(numerics.router_weight)},
                 {"bias", numerics.bias ? "yes" : "no"},
                 {"combine_groups", std::to_string(numerics.combine_groups)},
                 {"wgrad", weight_gradient_name(numerics.weight_gradient)}};
  if (state) traced.more.emplace_back("state", *state == sim::State::kPaused ? kPaused : kSustained);
  return traced;
}

}  // namespace uniep::cli
