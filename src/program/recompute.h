#pragma once

#include "program/build.h"
#include "uniep/schedule.h"

// What backward runs before its own Program with save.z = recompute: of a forward FC1, and with save.xg = redispatch
// the dispatch of x beside it, whose rows FC1's weight gradient reads as well. It is a call of its own: it has its own
// epoch, and its GEMM is forward's.
namespace uniep::program {

// The Schedule of that Program: what forward would take on this machine, as far as `backward` leaves open which rows
// travel how. A function of its arguments alone, so that all ranks find the same. `request` is the backward's.
Schedule recompute_schedule(const Schedule& backward, const ScheduleRequest& request);

// Whether x is dispatched in backward's own Program: not where recomputing z has brought it.
inline bool dispatches_x_again(const Schedule& backward, bool weight_gradients) {
  return backward.save_xg == SaveXg::kRedispatch && backward.save_z == SaveZ::kKeep && weight_gradients;
}

}  // namespace uniep::program
