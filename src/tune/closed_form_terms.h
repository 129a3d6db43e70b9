#pragma once

#include "tune/closed_form.h"

// What the closed forms of both directions have in common.
namespace uniep::tune {

inline constexpr double kElement = 2;                  // bytes of a bf16
inline constexpr double kMicrosecondsPerCycle = 1e-3;  // at 1 GHz

inline double us_of_bytes(double bytes, double gigabytes_per_second) {
  return bytes > 0 ? bytes * 1e-3 / gigabytes_per_second : 0;
}

inline double row_bytes(const Problem& problem) {
  return static_cast<double>(problem.shape.hidden) * kElement;
}

// GHz at a load of the tensor cores, in a call of so many us.
double clock_of(const Problem& problem, double load, double us);

// Both row GEMMs at one clock, in us.
struct RowGemms {
  double first = 0, second = 0;            // all tiles
  double first_tile = 0, second_tile = 0;  // one of each, which nothing slows down
  double loads = 0;                        // of all tiles, as if nothing slowed them down: what loads tensor cores
};
RowGemms row_gemms(const Problem& problem, const GemmPart& gemm, const CombinePart& combine, double computing,
                   double clock);
// Of a tile of one of the row GEMMs.
sim::OperandWait operand_wait(const Problem& problem, GemmStage stage, const TileShape& tile, int64_t depth);
// The share of their time that copies take at this clock.
double copies_at(const Problem& problem, double clock);
// While so many workers run tiles.
sim::OperandPath operand_path(const Problem& problem, double computing, double clock);

// A combine with groups: who sums a token's rows of a group waits for all experts.
struct GroupedTimes {
  double send = 0, send_task = 0;        // us of all sends, and of the longest task
  double sum_beside = 0, sum_after = 0;  // KB/us
  double second = 0;                     // us of the second GEMM's tiles
  // From one begin on, when the second GEMM and when all tiles are done, and until when senders are at the dispatch.
  double second_end = 0, tiles = 0, copied = 0;
};
// us of all sends, whose work alone takes `work`: a task ends when what it has sent is there.
double grouped_send(const Problem& problem, int chunks, double work);
struct GroupedEnd {
  double there = 0;  // when the last results are at their tokens' ranks
  double left = 0;   // us of sums after that and after the last tile
};
GroupedEnd grouped_end(const CombinePart& combine, const GroupedTimes& times);

// Backward alone.
MemoryTimes backward_memory(const Problem& problem);
void add_weight_gradients(const Problem& problem, const Schedule& schedule, GemmPart& part);
Estimate estimate_backward(const Problem& problem, const Parts& parts, int rounds);

}  // namespace uniep::tune
