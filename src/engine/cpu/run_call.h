#pragma once

#include "engine/cpu/call.h"
#include "engine/cpu/worker_threads.h"
#include "program/order.h"

namespace uniep::cpu {

// Which thread runs an agent of a worker, counted over all ranks. A shuffled call deals the agents at random, so that
// the two of a worker, and the two workers of a pair, meet on one thread or on two.
int thread_of_agent(const internal::Disturbance& disturbance, int64_t worker, AgentRole role, int threads);

// Runs all agents of all ranks until the call is over; throws what stopped it (a time-out, say).
void run_call(Call& call, WorkerThreads& threads, std::vector<TileEvent>* events);

}  // namespace uniep::cpu
