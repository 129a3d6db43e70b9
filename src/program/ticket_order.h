#pragma once

#include <vector>

#include "program/checker.h"

namespace uniep::program {

// The tasks of a launch's compute list in the order in which the checker has them taken (checker.h says why): as the
// list has them, but for the queues of mixed GEMMs and of weight gradients beside dgrads.
std::vector<Task> compute_tasks_as_taken(const RankProgram& p, int launch, const CheckTampering& tampering);

}  // namespace uniep::program
