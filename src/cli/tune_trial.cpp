#include "cli/tune_trial.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>

#include "engine/engine.h"

namespace uniep::cli {
namespace {

constexpr std::chrono::milliseconds kPause{200};

}  // namespace

LayerTrial::LayerTrial(Group& group, LayerRunner& runner, Direction direction, const Schedule& forward,
                       sim::State state)
    : group_(group), runner_(runner), direction_(direction), forward_(forward), state_(state) {
  if (direction_ == Direction::kBackward) runner_.forward(forward_);
}

void LayerTrial::call(const Schedule& schedule) {
  direction_ == Direction::kForward ? runner_.forward(schedule) : runner_.backward(schedule);
}

int64_t LayerTrial::of_first_rank(int64_t own) {
  return group_.implementation().all_gather(own).front();
}

double LayerTrial::cost(double milliseconds) const {
  return milliseconds + (state_ == sim::State::kPaused ? static_cast<double>(kPause.count()) : 0);
}

double LayerTrial::milliseconds(const Schedule& schedule) {
  if (state_ == sim::State::kPaused) {
    std::this_thread::sleep_for(kPause);
    of_first_rank(0);  // all ranks begin together
  }
  runner_.repeat(direction_, schedule);
  return std::bit_cast<double>(of_first_rank(std::bit_cast<int64_t>(runner_.milliseconds())));
}

// A call that is to follow a pause stands alone.
bool LayerTrial::queues_calls() const {
  return state_ == sim::State::kSustained && group_.engine() == EngineKind::kCuda;
}

std::vector<double> LayerTrial::milliseconds_in_turn(std::span<const Schedule> schedules) {
  std::vector<double> times = runner_.repeat_in_turn(direction_, schedules);
  for (double& time : times) time = std::bit_cast<double>(of_first_rank(std::bit_cast<int64_t>(time)));
  return times;
}

// Until clocks are those that the power limit leaves: what calls take is known to all ranks alike.
void LayerTrial::warm_up(const Schedule& schedule) {
  constexpr double kMilliseconds = 1000;
  if (!queues_calls()) return;
  const std::vector<Schedule> calls(8, schedule);
  for (double spent = 0; spent < kMilliseconds;) {
    for (const double time : milliseconds_in_turn(calls)) spent += std::max(0.01, time);
  }
}

uint64_t LayerTrial::checksum(const Schedule& schedule) {
  call(schedule);
  uint64_t sum = 0;
  for (const int64_t of_rank : group_.implementation().all_gather(static_cast<int64_t>(runner_.checksum(direction_)))) {
    sum = sum * 31 + static_cast<uint64_t>(of_rank);
  }
  return sum;
}

// The most of any rank.
int64_t LayerTrial::spilled_bytes(const Schedule& schedule) {
  const std::vector<int64_t> of_ranks = group_.implementation().all_gather(runner_.spilled_bytes(direction_, schedule));
  return *std::max_element(of_ranks.begin(), of_ranks.end());
}

void LayerTrial::recover() {
  group_.recover();
  if (direction_ == Direction::kBackward) runner_.forward(forward_);
}

}  // namespace uniep::cli
