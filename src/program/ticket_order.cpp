#include "program/ticket_order.h"

#include "program/wgrad_queues.h"

namespace uniep::program {
namespace {

// The tickets that one walker takes alone.
class LoneCounters {
 public:
  LoneCounters(const GemmQueues& queues, bool always_due) : queues_(queues), always_due_(always_due) {}

  int64_t taken(GemmQueue queue) const {
    return queue == GemmQueue::kFirst && always_due_ ? queues_.first_tickets : taken_[static_cast<int>(queue)];
  }
  int64_t take(GemmQueue queue) { return taken_[static_cast<int>(queue)]++; }

 private:
  const GemmQueues& queues_;
  const bool always_due_;
  int64_t taken_[2] = {0, 0};
};

// The same, where weight gradients go beside the dgrads: to one that takes them they are due at once.
class LoneLayerCounters {
 public:
  explicit LoneLayerCounters(const WgradQueues& queues) : queues_(queues) {}

  int64_t taken(LayerQueue queue) const {
    return queue == LayerQueue::kFirst ? queues_.dgrads.first_tickets : taken_[static_cast<int>(queue)];
  }
  int64_t take(LayerQueue queue) { return taken_[static_cast<int>(queue)]++; }

 private:
  const WgradQueues& queues_;
  int64_t taken_[3] = {0, 0, 0};
};

// Lent walkers may be away: the one whose walk is proved is one of the others.
int32_t kept_walkers(const RankProgram& p, const GemmQueues& queues) {
  return queues.walkers - p.lent_workers / p.cluster;
}

std::vector<Task> layer_tasks_as_taken(const RankProgram& p, int launch, const CheckTampering& tampering) {
  std::vector<Task> tasks;
  const WgradQueues queues = wgrad_queues(p, launch);
  const auto takes = [&](int32_t walker) {
    return tampering.takes_beside ? tampering.takes_beside(walker) : takes_beside(queues, walker);
  };
  int32_t walker = 0;
  while (walker < kept_walkers(p, queues.dgrads) - 1 && takes(walker)) ++walker;
  WgradQueueWalk walk = begin_walk(p, launch, walker * p.cluster, queues);
  walk.takes_beside = takes(walker);
  LoneLayerCounters counters(queues);
  for (;;) {
    const LayerTicket ticket = take_layer_ticket(p, launch, queues, walk, counters);
    if (ticket.queue == LayerQueue::kNone) return tasks;
    for (int32_t i = 0; i < p.cluster; ++i) {
      ListCursor cursor;
      tasks.push_back(task_of_ticket(p, queues, ticket, i, cursor));
    }
  }
}

}  // namespace

std::vector<Task> compute_tasks_as_taken(const RankProgram& p, int launch, const CheckTampering& tampering) {
  std::vector<Task> tasks;
  const int64_t length = list_length(p, launch, ListKind::kCompute);
  if (length > 0 && has_wgrad_queues(p, launch)) return layer_tasks_as_taken(p, launch, tampering);
  int64_t listed = 0;  // from where on the list has the tasks
  if (length > 0 && has_gemm_queues(p, launch)) {
    GemmQueues queues = gemm_queues(p, launch);
    const int32_t walkers = queues.walkers;
    listed = gemm_positions(p, queues);
    if (tampering.gemm_queues) tampering.gemm_queues(queues);
    const auto prefers = [&](int32_t walker) {
      return tampering.prefers_second ? tampering.prefers_second(walker) : prefers_second(p, walker, walkers);
    };
    int32_t walker = 0;
    while (walker < kept_walkers(p, queues) - 1 && prefers(walker)) ++walker;
    GemmQueueWalk walk = begin_walk(p, launch, walker * p.cluster, queues);
    walk.prefers_second = prefers(walker);
    LoneCounters counters(queues, walkers > 1 && walk.prefers_second);
    for (;;) {
      const GemmTicket ticket = take_gemm_ticket(p, queues, walk, counters);
      if (!ticket.found) break;
      for (int32_t i = 0; i < p.cluster; ++i) {
        tasks.push_back(segment_task(p, ticket.segment, ticket.index * p.cluster + i));
      }
    }
  }
  for (int64_t i = listed; i < length; ++i) {
    tasks.push_back(list_task(p, launch, ListKind::kCompute, i));
  }
  return tasks;
}

}  // namespace uniep::program
