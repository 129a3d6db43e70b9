#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "program/checker.h"

namespace uniep::program {

inline constexpr std::size_t kMaxProblems = 20;  // of each kind that a report lists

// All tasks of all ranks in the order of their lists, and the edges between them.
class TaskGraph {
 public:
  struct Node {
    int rank;
    int launch;
    ListKind list;
    int64_t position;
    Task task;
  };

  TaskGraph(const Program& program, const CheckTampering& tampering);

  const std::vector<Node>& nodes() const { return nodes_; }
  int64_t edge_count() const { return static_cast<int64_t>(edges_.size()); }
  const std::vector<std::string>& problems() const { return problems_; }

  // Adds the edges "next in the queue" (agents' static queues, tickets, launches) and "waits for".
  void add_queue_edges();
  void add_wait_edges();
  // Nodes that can never run, by Kahn's algorithm; empty when there is no cycle.
  std::vector<int64_t> stuck() const;
  std::string describe(int64_t task_node) const;
  // The tasks whose signals a task waits for, ascending.
  std::vector<int64_t> awaited_by(int64_t node) const;

 private:
  struct Signalled {
    uint64_t amount = 0;
    std::vector<int64_t> by;
    int64_t node = -1;  // in the graph, once somebody waits for it
  };

  template <typename Counter, typename Flag>
  void for_each_signal_awaited(int64_t node, Counter&& counter, Flag&& flag) const;
  std::vector<Task> tasks_as_taken(const RankProgram& p, int launch, ListKind kind) const;
  void list_tasks();
  void collect_signals();
  void problem(std::string text);
  void add_edge(int64_t from, int64_t to) { edges_.push_back({static_cast<int32_t>(from), static_cast<int32_t>(to)}); }
  struct List {
    int64_t begin, length;
  };
  List list_of(int rank, int launch, ListKind kind) const;
  void count_owners(int rank, int launch, ListKind kind, std::vector<int32_t>& owners) const;
  static int64_t neighbour_of(int64_t position);
  void chain_agent(int rank, int worker, AgentRole role);
  int64_t node_of(Signalled& signal);
  void require_flag(int64_t node, const FlagWait& wait);
  void require_counter(int64_t node, const CounterWait& wait);

  const Program& program_;
  const CheckTampering& tampering_;
  SignalLayout layout_;
  std::vector<Node> nodes_;
  std::vector<int64_t> list_begin_;  // [rank, launch, list] first task node
  std::vector<int64_t> gate_;        // [rank, launch] the node between a launch and the next; after the tasks
  int64_t signal_nodes_ = 0;         // nodes of counters and flags; after the gates
  std::vector<std::vector<Signalled>> counters_, flags_;  // [rank][index]
  struct Edge {
    int32_t from, to;
  };
  std::vector<Edge> edges_;
  std::vector<std::string> problems_;
};

}  // namespace uniep::program
