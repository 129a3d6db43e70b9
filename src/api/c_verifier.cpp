#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "api/c_handles.h"
#include "uniep/verifier.h"

namespace uniep {
namespace {

// One entry a local rank, each made by `convert`.
template <typename Given, typename Convert>
auto of_ranks(const Given* given, int32_t count, const Group& group, const char* name, Convert&& convert) {
  check_count(count, group);
  return converted(given, count, name, convert);
}

VerifierOptions verifier_options(const uniep_verifier_options* options) {
  VerifierOptions made;
  if (options == nullptr) return made;
  const uniep_verifier_options given = read_struct<uniep_verifier_options>(options, "options");
  if (given.every != 0) made.every = given.every;
  if (given.budget != 0) made.budget = given.budget;
  if (given.folder != nullptr) made.folder = given.folder;
  if (given.seed != 0) made.seed = given.seed;
  if (given.layer_count < 0) {
    throw Error(Status::kInvalidArgument,
                fmt::format("options.layer_count: {}; must not be negative", given.layer_count));
  }
  if (given.layer_count > 0) require_pointer(given.layers, "options.layers");
  for (int32_t i = 0; i < given.layer_count; ++i) {
    require_pointer(given.layers[i], "options.layers");
    made.layers.emplace_back(given.layers[i]);
  }
  return made;
}

}  // namespace
}  // namespace uniep

struct uniep_verifier {
  std::shared_ptr<uniep::Group> group;
  uniep::Verifier verifier;
  uniep::ResolvedSchedules schedules;
  std::vector<uniep::Finding> findings;
};

using namespace uniep;

uniep_status uniep_verifier_create(uniep_group* group, const uniep_verifier_options* options,
                                   uniep_verifier** verifier) {
  return guarded([&] {
    require_pointer(verifier, "verifier");
    *verifier = nullptr;
    require_pointer(group, "group");
    const std::shared_ptr<Group> own(group->state, &group->state->group);
    *verifier = new uniep_verifier{own, {*own, verifier_options(options)}, {}, {}};
  });
}

void uniep_verifier_destroy(uniep_verifier* verifier) {
  delete verifier;
}

uniep_status uniep_verifier_after_forward(uniep_verifier* verifier, const char* layer, const uniep_layer_config* config,
                                          const char* schedule, const uniep_routing* routings,
                                          const uniep_forward_arguments* arguments, int32_t count,
                                          const uniep_saved* saved) {
  return guarded([&] {
    require_pointer(verifier, "verifier");
    require_pointer(layer, "layer");
    require_pointer(schedule, "schedule");
    const Group& group = *verifier->group;
    const LayerConfig whole = layer_config(config);
    const std::vector<Routing> routed = of_ranks(routings, count, group, "routings", routing);
    verifier->verifier.after_forward(
        {layer, whole,
         verifier->schedules.find(schedule, Direction::kForward, Operation::kLayer, whole, group.machine()), routed},
        of_ranks(arguments, count, group, "arguments", forward_arguments), saved == nullptr ? Saved() : saved->saved);
  });
}

uniep_status uniep_verifier_before_backward(uniep_verifier* verifier, const char* layer,
                                            const uniep_layer_config* config, const uniep_backward_arguments* arguments,
                                            int32_t count) {
  return guarded([&] {
    require_pointer(verifier, "verifier");
    require_pointer(layer, "layer");
    verifier->verifier.before_backward(layer, layer_config(config),
                                       of_ranks(arguments, count, *verifier->group, "arguments", backward_arguments));
  });
}

uniep_status uniep_verifier_after_backward(uniep_verifier* verifier, const char* layer,
                                           const uniep_layer_config* config, const char* schedule,
                                           const uniep_routing* routings, const uniep_backward_arguments* arguments,
                                           int32_t count) {
  return guarded([&] {
    require_pointer(verifier, "verifier");
    require_pointer(layer, "layer");
    require_pointer(schedule, "schedule");
    const Group& group = *verifier->group;
    const LayerConfig whole = layer_config(config);
    const std::vector<Routing> routed = of_ranks(routings, count, group, "routings", routing);
    verifier->verifier.after_backward(
        {layer, whole,
         verifier->schedules.find(schedule, Direction::kBackward, Operation::kLayer, whole, group.machine()), routed},
        of_ranks(arguments, count, group, "arguments", backward_arguments));
  });
}

uniep_status uniep_verifier_end_step(uniep_verifier* verifier, int32_t* findings) {
  return guarded([&] {
    require_pointer(verifier, "verifier");
    require_pointer(findings, "findings");
    verifier->findings = verifier->verifier.end_step();
    *findings = static_cast<int32_t>(verifier->findings.size());
  });
}

uniep_status uniep_verifier_finding(const uniep_verifier* verifier, int32_t index, uniep_finding* finding) {
  return guarded([&] {
    require_pointer(verifier, "verifier");
    const std::size_t size = checked_size<uniep_finding>(finding, "finding");
    if (index < 0 || static_cast<std::size_t>(index) >= verifier->findings.size()) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("index: {}; the latest step has {} findings", index, verifier->findings.size()));
    }
    const Finding& found = verifier->findings[static_cast<std::size_t>(index)];
    uniep_finding value{};
    value.kind = static_cast<int32_t>(found.kind);
    value.direction = static_cast<int32_t>(found.direction);
    value.rank = found.rank;
    value.expert = found.expert;
    value.row = found.row;
    value.column = found.column;
    value.tiles = found.tiles;
    value.layer = found.layer.c_str();
    value.tensor = found.tensor.c_str();
    value.file = found.file.c_str();
    value.message = found.message.c_str();
    write_struct(value, finding, size);
  });
}
