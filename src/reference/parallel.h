#pragma once

#include <cstdint>
#include <functional>

namespace uniep::reference {

// Calls task(i) once for every i in [0, count), on as many threads as the work is worth and the machine has. The tasks
// must write to different places, so that the result does not depend on the number of threads. An exception of a task
// is thrown again here. `flops` is the work of all tasks together.
void parallel_for(int64_t count, double flops, const std::function<void(int64_t)>& task);

}  // namespace uniep::reference
