#pragma once

#include <functional>
#include <string>
#include <vector>

#include "program/build.h"
#include "program/edges.h"
#include "program/gemm_queues.h"
#include "program/order.h"

// Proves of one Program, by going through all tasks of all ranks, that
//   - every tile is in exactly one agent's queue, and every row, output and sum is made exactly once;
//   - every tile waits for the tiles that write what it reads;
//   - every wait can be met: the amounts signalled to a counter add up to its threshold, a flag has one writer;
//   - no queue can deadlock: the edges "next in the queue" and "waits for" of all ranks have no cycle.
//
// What is next in a queue. A walker is a worker's agent, or in clusters the compute agents of a pair of workers, which
// take two neighbouring positions together and begin neither before both can begin. A walker takes nothing before what
// it took last can begin, and what can begin ends.
//   Static queues: a walker's next position is behind the one before it, a list behind the walker's list before.
//   Dynamic queues: a list's next ticket is behind the one before it, the list behind the lists that its walkers walk
//     before. Take the first task, in an order without cycles, that has not run. All before it in its list have run,
//     and so have all walkers' earlier lists: somebody takes it. What it waits for has run: it runs.
//   The two queues of mixed GEMMs (gemm_queues.h): each in the order of its tickets, the second behind the whole first;
//     then what is left of the compute list. This is the walk of one that does not prefer the second GEMM, and there is
//     one where there are several walkers (that is checked too). Take again the first task that has not run. If it is
//     of the first GEMM, this walker holds nothing but tickets before it, which have run, so it is taken. If it is of
//     the second, the first one's tickets are over, so whoever is not waiting takes it, and who is waiting holds a
//     later ticket or this one. Walkers that prefer the second GEMM may hold any of its tickets meanwhile: nothing
//     rests on them, nor on when a ticket is due. A walker alone takes tickets in one order, which is the order proved.
//     If all of several walkers preferred the second GEMM, they might all wait in it: then it stands before the first.
//   The three queues of dgrads and weight gradients (wgrad_queues.h): likewise, dgrad FC2, dgrad FC1, weight gradients.
//     This is the walk of one that takes no weight gradients beside dgrads, and there is one.
//   Lent workers (comm.lend_sms) walk dynamic lists alone, may begin late, and take nothing more when they leave. Who
//     takes a ticket is not part of the above, but for the one that takes of the first queue: it is none of them.
namespace uniep::program {

struct CheckReport {
  bool ok = true;
  std::vector<std::string> problems;  // the first few, in words
  int64_t tasks = 0;
  int64_t edges = 0;
};

// What a test may falsify to see that the checker notices.
struct CheckTampering {
  std::function<bool(int rank, const Task&, CounterWait&)> wait;  // false drops the wait
  std::function<bool(int rank, const Task&, const FlagWait&)> flag_wait;
  std::function<bool(int rank, const Task&, CounterSignal&)> signal;  // false drops the signal
  std::function<bool(int rank, const Task&, FlagSignal&)> flag;
  std::function<void(int rank, std::vector<Task>& list)> list;
  std::function<bool(int rank, const Task&)> returns_probs;  // in place of edges.h's returns_prob_gradients()
  std::function<bool(int walker)> prefers_second;            // in place of gemm_queues.h's
  std::function<void(GemmQueues&)> gemm_queues;
  std::function<bool(int walker)> takes_beside;  // in place of wgrad_queues.h's
};

CheckReport check_program(const Program& program, const CheckTampering& tampering = {});

}  // namespace uniep::program
