#include "program/task_graph.h"

#include <fmt/format.h>

#include <algorithm>

#include "program/ticket_order.h"

namespace uniep::program {
TaskGraph::TaskGraph(const Program& program, const CheckTampering& tampering)
    : program_(program), tampering_(tampering), layout_(signal_layout(program.rank(0))) {
  list_tasks();
  collect_signals();
}

void TaskGraph::problem(std::string text) {
  if (problems_.size() < kMaxProblems) problems_.push_back(std::move(text));
}

std::string TaskGraph::describe(int64_t task_node) const {
  const Node& n = nodes_[task_node];
  return fmt::format("rank {} launch {} {} (expert {}, m {}, n {})", n.rank, n.launch,
                     stage_name(n.task.stage, program_.request().direction), n.task.expert, n.task.m, n.task.n);
}

TaskGraph::List TaskGraph::list_of(int rank, int launch, ListKind kind) const {
  const int64_t index = (static_cast<int64_t>(rank) * kMaxLaunches + launch) * kListKinds + static_cast<int>(kind);
  return {list_begin_[index], list_begin_[index + 1] - list_begin_[index]};
}

std::vector<Task> TaskGraph::tasks_as_taken(const RankProgram& p, int launch, ListKind kind) const {
  if (kind == ListKind::kCompute) return compute_tasks_as_taken(p, launch, tampering_);
  std::vector<Task> list;
  const int64_t length = list_length(p, launch, kind);
  for (int64_t i = 0; i < length; ++i) list.push_back(list_task(p, launch, kind, i));
  return list;
}

void TaskGraph::list_tasks() {
  std::vector<Task> list;
  for (int rank = 0; rank < program_.ranks(); ++rank) {
    const RankProgram& p = program_.rank(rank);
    for (int launch = 0; launch < kMaxLaunches; ++launch) {
      for (int kind = 0; kind < kListKinds; ++kind) {
        list_begin_.push_back(static_cast<int64_t>(nodes_.size()));
        if (launch >= p.launches) continue;
        list = tasks_as_taken(p, launch, static_cast<ListKind>(kind));
        if (tampering_.list) tampering_.list(rank, list);
        for (std::size_t i = 0; i < list.size(); ++i) {
          nodes_.push_back({rank, launch, static_cast<ListKind>(kind), static_cast<int64_t>(i), list[i]});
        }
      }
    }
  }
  list_begin_.push_back(static_cast<int64_t>(nodes_.size()));
  gate_.resize(static_cast<std::size_t>(program_.ranks()) * kMaxLaunches);
  for (std::size_t i = 0; i < gate_.size(); ++i) gate_[i] = static_cast<int64_t>(nodes_.size() + i);
}

void TaskGraph::collect_signals() {
  counters_.assign(program_.ranks(), std::vector<Signalled>(layout_.counter_total));
  flags_.assign(program_.ranks(), std::vector<Signalled>(layout_.flag_total));
  for (int64_t node = 0; node < static_cast<int64_t>(nodes_.size()); ++node) {
    const Node& n = nodes_[node];
    const RankProgram& p = program_.rank(n.rank);
    for_each_counter_signal(p, n.task, [&](CounterSignal signal) {
      if (tampering_.signal && !tampering_.signal(n.rank, n.task, signal)) return;
      Signalled& counter = counters_[n.rank][layout_.counters[static_cast<int>(signal.space)] + signal.index];
      counter.amount += signal.amount;
      if (counter.by.empty() || counter.by.back() != node) counter.by.push_back(node);
    });
    for_each_flag_signal(p, n.task, [&](FlagSignal signal) {
      if (tampering_.flag && !tampering_.flag(n.rank, n.task, signal)) return;
      Signalled& flag = flags_[signal.peer][layout_.flags[static_cast<int>(signal.space)] + signal.index];
      ++flag.amount;
      flag.by.push_back(node);
    });
  }
}

// Clusters: two tiles that share weight tiles start together.
int64_t TaskGraph::neighbour_of(int64_t position) {
  return position % 2 == 0 ? position + 1 : position - 1;
}

void TaskGraph::chain_agent(int rank, int worker, AgentRole role) {
  const RankProgram& p = program_.rank(rank);
  for (int launch = 0; launch < p.launches; ++launch) {
    int64_t last = launch > 0 ? gate_[rank * kMaxLaunches + launch - 1] : -1;
    for (int kind = 0; kind < kListKinds; ++kind) {
      const ListKind list = static_cast<ListKind>(kind);
      if (!walks_list(p, launch, worker, role, list)) continue;
      const auto [begin, length] = list_of(rank, launch, list);
      if (length == 0) continue;
      if (p.dynamic) {  // tickets: whoever comes takes the next, so the whole list is one queue
        if (last >= 0) add_edge(last, begin);
        last = begin + length - 1;
        continue;
      }
      const Participants who = participants_of(p, launch, list);
      const bool in_pair = list == ListKind::kCompute && p.cluster == 2;
      for (int64_t index = 0;; ++index) {
        const int64_t position = static_position(p, who, worker, index);
        if (position >= length) break;
        if (in_pair &&
            static_position(p, who, static_cast<int32_t>(neighbour_of(worker)), index) != neighbour_of(position)) {
          problem(fmt::format("{} is taken without its neighbour", describe(begin + position)));
          break;
        }
        if (last >= 0) {
          add_edge(last, begin + position);
          if (in_pair && neighbour_of(position) < length) add_edge(last, begin + neighbour_of(position));
        }
        last = begin + position;
      }
    }
    if (last >= 0) add_edge(last, gate_[rank * kMaxLaunches + launch]);
  }
}

// How many agents have each task of a list in their queue.
void TaskGraph::count_owners(int rank, int launch, ListKind kind, std::vector<int32_t>& owners) const {
  const RankProgram& p = program_.rank(rank);
  const auto [begin, length] = list_of(rank, launch, kind);
  bool walked = false;
  for (int worker = 0; worker < p.workers; ++worker) {
    for (const AgentRole role : {AgentRole::kCopy, AgentRole::kCompute}) {
      if (!walks_list(p, launch, worker, role, kind)) continue;
      walked = true;
      if (p.dynamic) continue;
      const Participants who = participants_of(p, launch, kind);
      for (int64_t index = 0;; ++index) {
        const int64_t position = static_position(p, who, worker, index);
        if (position >= length) break;
        ++owners[begin + position];
      }
    }
  }
  if (p.dynamic && walked) std::fill_n(owners.begin() + begin, length, 1);
}

void TaskGraph::add_queue_edges() {
  std::vector<int32_t> owners(nodes_.size(), 0);
  for (int rank = 0; rank < program_.ranks(); ++rank) {
    const RankProgram& p = program_.rank(rank);
    for (int worker = 0; worker < p.workers; ++worker) {
      chain_agent(rank, worker, AgentRole::kCopy);
      chain_agent(rank, worker, AgentRole::kCompute);
    }
    for (int launch = 0; launch < p.launches; ++launch) {
      for (int kind = 0; kind < kListKinds; ++kind) {
        count_owners(rank, launch, static_cast<ListKind>(kind), owners);
        if (!p.dynamic) continue;
        const auto [begin, length] = list_of(rank, launch, static_cast<ListKind>(kind));
        for (int64_t i = 1; i < length; ++i) add_edge(begin + i - 1, begin + i);
      }
    }
  }
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    if (owners[node] != 1) problem(fmt::format("{} is in {} queues", describe(node), owners[node]));
  }
}

void TaskGraph::require_counter(int64_t node, const CounterWait& wait) {
  Signalled& counter = counters_[nodes_[node].rank][layout_.counters[static_cast<int>(wait.space)] + wait.index];
  if (counter.amount != wait.threshold) {
    problem(fmt::format("{} waits for {} of a counter that is advanced by {} in all", describe(node), wait.threshold,
                        counter.amount));
  }
  add_edge(node_of(counter), node);
}

int64_t TaskGraph::node_of(Signalled& signal) {
  if (signal.node < 0) {
    signal.node = static_cast<int64_t>(nodes_.size() + gate_.size()) + signal_nodes_++;
    for (const int64_t from : signal.by) add_edge(from, signal.node);
  }
  return signal.node;
}

void TaskGraph::require_flag(int64_t node, const FlagWait& wait) {
  if (wait.space == FlagSpace::kArrive) return;  // stored before anything is queued
  Signalled& flag = flags_[nodes_[node].rank][layout_.flags[static_cast<int>(wait.space)] + wait.index];
  uint64_t writers = 1;
  if (!flag.by.empty() && is_flag_guarded(program_.rank(nodes_[flag.by[0]].rank), nodes_[flag.by[0]].task)) {
    writers = flag_guard(program_.rank(nodes_[flag.by[0]].rank), nodes_[flag.by[0]].task).threshold;
  }
  if (flag.amount != writers) {
    problem(fmt::format("{} waits for a flag that has {} writers, not {}", describe(node), flag.amount, writers));
  }
  add_edge(node_of(flag), node);
}

// Calls counter(wait) and flag(wait) for each wait of a task, as tampered with, once each.
template <typename Counter, typename Flag>
void TaskGraph::for_each_signal_awaited(int64_t node, Counter&& counter, Flag&& flag) const {
  struct Visitor {
    const TaskGraph& graph;
    const Node& n;
    Counter& counter;
    Flag& flag;
    std::vector<int64_t> seen;  // a wait may come more than once
    bool first(int64_t key) {
      if (std::find(seen.begin(), seen.end(), key) != seen.end()) return false;
      seen.push_back(key);
      return true;
    }
    void operator()(CounterWait wait) {
      if (graph.tampering_.wait && !graph.tampering_.wait(n.rank, n.task, wait)) return;
      if (first(graph.layout_.counters[static_cast<int>(wait.space)] + wait.index)) counter(wait);
    }
    void operator()(const FlagWait& wait) {
      if (graph.tampering_.flag_wait && !graph.tampering_.flag_wait(n.rank, n.task, wait)) return;
      if (first(-1 - (graph.layout_.flags[static_cast<int>(wait.space)] + wait.index))) flag(wait);
    }
  };
  const Node& n = nodes_[node];
  for_each_wait(program_.rank(n.rank), n.task, Visitor{*this, n, counter, flag, {}});
}

void TaskGraph::add_wait_edges() {
  for (int64_t node = 0; node < static_cast<int64_t>(nodes_.size()); ++node) {
    const auto require_what_holds_back = [&](int64_t waiting) {
      for_each_signal_awaited(
          waiting, [&](const CounterWait& wait) { require_counter(node, wait); },
          [&](const FlagWait& wait) { require_flag(node, wait); });
    };
    require_what_holds_back(node);
    const Node& n = nodes_[node];
    if (n.list == ListKind::kCompute && program_.rank(n.rank).cluster == 2 &&
        neighbour_of(n.position) < list_of(n.rank, n.launch, n.list).length) {
      require_what_holds_back(node - n.position + neighbour_of(n.position));
    }
  }
}

std::vector<int64_t> TaskGraph::awaited_by(int64_t node) const {
  const int rank = nodes_[node].rank;
  std::vector<int64_t> awaited;
  const auto add = [&](const Signalled& signal) { awaited.insert(awaited.end(), signal.by.begin(), signal.by.end()); };
  for_each_signal_awaited(
      node,
      [&](const CounterWait& wait) {
        add(counters_[rank][layout_.counters[static_cast<int>(wait.space)] + wait.index]);
      },
      [&](const FlagWait& wait) { add(flags_[rank][layout_.flags[static_cast<int>(wait.space)] + wait.index]); });
  std::sort(awaited.begin(), awaited.end());
  return awaited;
}

std::vector<int64_t> TaskGraph::stuck() const {
  const std::size_t count = nodes_.size() + gate_.size() + signal_nodes_;
  std::vector<int32_t> missing(count, 0), begin(count + 1, 0), targets(edges_.size());
  for (const Edge& edge : edges_) {
    ++missing[edge.to];
    ++begin[edge.from + 1];
  }
  for (std::size_t i = 0; i < count; ++i) begin[i + 1] += begin[i];
  std::vector<int32_t> fill(begin.begin(), begin.end() - 1);
  for (const Edge& edge : edges_) targets[fill[edge.from]++] = edge.to;
  std::vector<int32_t> ready;
  for (std::size_t i = 0; i < count; ++i) {
    if (missing[i] == 0) ready.push_back(static_cast<int32_t>(i));
  }
  std::vector<bool> ran(count, false);
  while (!ready.empty()) {
    const int32_t node = ready.back();
    ready.pop_back();
    ran[node] = true;
    for (int32_t i = begin[node]; i < begin[node + 1]; ++i) {
      if (--missing[targets[i]] == 0) ready.push_back(targets[i]);
    }
  }
  std::vector<int64_t> stuck;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (!ran[i]) stuck.push_back(static_cast<int64_t>(i));
  }
  return stuck;
}

}  // namespace uniep::program
