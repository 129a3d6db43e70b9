#pragma once

#include "tune/closed_form.h"

// What the closed forms of both directions have in common.
namespace uniep::tune {

inline constexpr double kElement = 2;                  // bytes of a bf16
inline constexpr double kMicrosecondsPerCycle = 1e-3;  // at 1 GHz

inline double us_of_bytes(double bytes, double gigabytes_per_second) {
  return bytes > 0 ? bytes * 1e-3 / gigabytes_per_second : 0;
}

// GHz at a load of the tensor cores, in a call of so many us.
double clock_of(const Problem& problem, double load, double us);

// Backward alone.
MemoryTimes backward_memory(const Problem& problem);
void add_weight_gradients(const Problem& problem, const Schedule& schedule, GemmPart& part);
Estimate estimate_backward(const Problem& problem, const Parts& parts, int rounds);

}  // namespace uniep::tune
