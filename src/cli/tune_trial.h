#pragma once

#include "cli/layer_runner.h"
#include "sim/simulate.h"
#include "tune/search.h"

namespace uniep::cli {

// Calls of one direction of a layer through the public functions, in either launch mode. Rank 0 knows the times and the
// results of all ranks, and tells the others.
class LayerTrial : public tune::Trial {
 public:
  // Backward begins from what a forward under `forward` has saved. kSustained: one call follows the other; kPaused: a
  // pause lies before each.
  LayerTrial(Group& group, LayerRunner& runner, Direction direction, const Schedule& forward, sim::State state);

  double milliseconds(const Schedule& schedule) override;
  bool queues_calls() const override;
  std::vector<double> milliseconds_in_turn(std::span<const Schedule> schedules) override;
  int64_t spilled_bytes(const Schedule& schedule) override;
  double cost(double milliseconds) const override;
  uint64_t checksum(const Schedule& schedule) override;
  void warm_up(const Schedule& schedule) override;
  void recover() override;

 private:
  void call(const Schedule& schedule);
  int64_t of_first_rank(int64_t own);

  Group& group_;
  LayerRunner& runner_;
  Direction direction_;
  Schedule forward_;
  sim::State state_;
};

}  // namespace uniep::cli
