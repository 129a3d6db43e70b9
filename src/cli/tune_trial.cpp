#include "cli/tune_trial.h"

#include <bit>
#include <string>

#include "cli/run_report.h"
#include "engine/engine.h"

namespace uniep::cli {

LayerTrial::LayerTrial(Group& group, LayerRunner& runner, Direction direction, const Schedule& forward)
    : group_(group), runner_(runner), direction_(direction), forward_(forward) {
  if (direction_ == Direction::kBackward) runner_.forward(forward_);
}

void LayerTrial::call(const Schedule& schedule) {
  direction_ == Direction::kForward ? runner_.forward(schedule) : runner_.backward(schedule);
}

int64_t LayerTrial::of_first_rank(int64_t own) {
  return group_.implementation().all_gather(own).front();
}

double LayerTrial::milliseconds(const Schedule& schedule) {
  call(schedule);
  return std::bit_cast<double>(of_first_rank(std::bit_cast<int64_t>(runner_.milliseconds())));
}

uint64_t LayerTrial::checksum(const Schedule& schedule) {
  call(schedule);
  const LayerResult result = runner_.result();
  uint64_t sum = 0;
  if (group_.first_local_rank() == 0) {
    for (const auto& [name, hex] : checksums_of(result, direction_ == Direction::kBackward)) {
      sum = sum * 31 + std::stoull(hex, nullptr, 16);
    }
  }
  return static_cast<uint64_t>(of_first_rank(static_cast<int64_t>(sum)));
}

void LayerTrial::recover() {
  group_.recover();
  if (direction_ == Direction::kBackward) runner_.forward(forward_);
}

}  // namespace uniep::cli
