#pragma once

#include <functional>
#include <string>
#include <vector>

#include "program/build.h"
#include "program/edges.h"
#include "program/order.h"

// Proves of one Program, by going through all tasks of all ranks, that
//   - every tile is in exactly one agent's queue, and every row, output and sum is made exactly once;
//   - every tile waits for the tiles that write what it reads;
//   - every wait can be met: the amounts signalled to a counter add up to its threshold, a flag has one writer;
//   - no queue can deadlock: the edges "next in the queue" and "waits for" of all ranks have no cycle.
namespace uniep {

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
};

CheckReport check_program(const Program& program, const CheckTampering& tampering = {});

}  // namespace uniep
