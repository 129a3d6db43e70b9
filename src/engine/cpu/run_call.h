#pragma once

#include "engine/cpu/call.h"
#include "engine/cpu/worker_threads.h"

namespace uniep::cpu {

// Runs all agents of all ranks until the call is over; throws what stopped it (a time-out, say).
void run_call(Call& call, WorkerThreads& threads, std::vector<TileEvent>* events);

}  // namespace uniep::cpu
