#pragma once

#include "train/candidate_check.h"
#include "uniep/group.h"
#include "uniep/layer.h"

namespace uniep::test {

// A small layer on two ranks of the cpu engine, and a check of candidates beside what it runs.
struct CheckedLayer {
  explicit CheckedLayer(const Numerics& numerics = {}, double timeout_seconds = 0)
      : group(options(timeout_seconds)), layer{{64, 32, 8, 2}, numerics} {}

  static GroupOptions options(double timeout_seconds) {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = 2;
    options.workers = 2;
    options.timeout_seconds = timeout_seconds;
    return options;
  }
  Schedule schedule(Direction direction, const char* text) const {
    return resolve(
        PartialSchedule::parse(text),
        {.direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = group.machine()});
  }

  Group group;
  const LayerConfig layer;
  const Schedule forward = schedule(Direction::kForward, "fusion=none");
  const Schedule backward = schedule(Direction::kBackward, "fusion=none");
  const Schedule candidate = schedule(Direction::kBackward, "fusion=layer");
  train::CandidateCheck check{group, layer, 8 * 24, nullptr};
};

}  // namespace uniep::test
