#pragma once

#include "program/gemm_queues.h"

// Weight gradients beside the dgrads of their launch (backward.wgrad=mixed, under dynamic queues). dgrad FC2, dgrad FC1
// and the weight gradients have a queue each. Some of the walkers take weight gradients beside the others' dgrads: as
// many as the share of them that backward.wgrad_reserve leaves takes of the time that it and dgrad FC2 take. Such a
// walker goes from dgrad FC2 to weight gradients once the next one is due, stays with them until that share is taken,
// and then goes to dgrad FC1.
// Everybody comes to what is left of the weight gradients behind dgrad FC1's last ticket. So a walker changes its GEMM
// three times at most, and never comes back to dgrad FC2: a kernel has its mainloops one after the other.
//
// The others take tickets of dgrad FC2 more slowly than all would: where dy comes no faster than that, they do not wait
// for it, and weight gradients take no link's time.
//
// A ticket that its walker can not run yet is kept by it, and it waits. Still nobody waits for ever, if walkers take no
// ticket before what the last one waits for has come: dgrad FC2 waits for rows alone, so all of its tickets that are
// taken are run; and all are taken, for one walker at least takes nothing else before. Both others wait for dgrad FC2
// alone. That holds whenever a weight gradient is due, and however many take them, but for the one that does not.
namespace uniep::program {

UNIEP_HOST_DEVICE bool has_wgrad_queues(const RankProgram& p, int32_t launch) {
  const LaunchStages& stages = p.stages[launch];
  return p.wgrad_reserve >= 0 && p.dynamic && stages.first_gemm && stages.second_gemm && stages.wgrad_fc2;
}

enum class LayerQueue : int32_t { kFirst = 0, kSecond = 1, kWgrads = 2, kNone = 3 };

// The weight gradients' tickets are those of the list, which the dgrads leave alone.
UNIEP_HOST_DEVICE int64_t ticket_counter(int32_t launch, LayerQueue queue) {
  if (queue == LayerQueue::kWgrads) return ticket_counter(launch, ListKind::kCompute);
  return ticket_counter(launch, queue == LayerQueue::kFirst ? GemmQueue::kFirst : GemmQueue::kSecond);
}

struct WgradQueues {
  int32_t launch;
  GemmQueues dgrads;
  int64_t wgrad_tickets;
  int64_t beside;  // of these, that are taken beside the dgrads
  int32_t takers;  // of the walkers, that take them
};

// Where one walker stands.
struct WgradQueueWalk {
  LayerQueue at;        // the queue that it takes from
  bool takes_beside;    // and it has not been through with it
  int32_t chunk;        // of the ticket of dgrad FC1 that was taken last
  int64_t chunk_begin;  // the chunk's first ticket
  ListCursor cursor;    // at the ticket of the weight gradients that was looked at last
};

struct LayerTicket {
  LayerQueue queue;  // kNone: all are at their end
  int32_t chunk;     // of dgrad FC1
  int64_t index;     // in the queue; of dgrad FC1: in the chunk
};

inline constexpr int32_t kReserveParts = 16;  // backward.wgrad_reserve

// As many as what is taken beside the dgrads takes of the time that it and dgrad FC2 take.
UNIEP_HOST_DEVICE int32_t takers_beside(const RankProgram& p, int32_t walkers) {
  const int64_t rows = static_cast<int64_t>(p.block_begin[p.local_experts]) * p.tile_m;
  const int64_t hidden = p.wgrad_fc2.rows, intermediate = p.wgrad_fc2.columns, z_columns = p.wgrad_fc1.rows;
  const int64_t first = rows * intermediate * (hidden + kTileOverheadColumns);
  const int64_t wgrads =
      hidden * (intermediate + z_columns) * (rows + p.local_experts * kTileOverheadColumns) / kReserveParts;
  const int64_t beside = wgrads * (kReserveParts - p.wgrad_reserve);
  if (beside == 0) return 0;
  int64_t count = (walkers * beside + (first + beside) / 2) / (first + beside);
  if (count > walkers - 1) count = walkers - 1;
  if (count < 1) count = walkers > 1 ? 1 : 0;
  return static_cast<int32_t>(count);
}

UNIEP_HOST_DEVICE WgradQueues wgrad_queues(const RankProgram& p, int32_t launch) {
  WgradQueues queues{launch, gemm_queues(p, launch), 0, 0, 0};
  const ExpertRange all{0, p.local_experts};
  queues.wgrad_tickets = tickets_of(p, {Stage::kWgradFc2, all, 0}) + tickets_of(p, {Stage::kWgradFc1, all, 0});
  queues.beside = queues.wgrad_tickets * (kReserveParts - p.wgrad_reserve) / kReserveParts;
  queues.takers = takers_beside(p, queues.dgrads.walkers);
  return queues;
}

UNIEP_HOST_DEVICE bool takes_beside(const WgradQueues& queues, int32_t walker) {
  const int64_t walkers = queues.dgrads.walkers, takers = queues.takers;
  return (walker + 1) * takers / walkers > walker * takers / walkers;
}

// Where the weight gradients begin in the list.
UNIEP_HOST_DEVICE ListCursor wgrad_cursor(const RankProgram& p, int32_t launch, const WgradQueues& queues) {
  return {gemm_step_count(p, p.stages[launch]), gemm_positions(p, queues.dgrads)};
}

UNIEP_HOST_DEVICE WgradQueueWalk begin_walk(const RankProgram& p, int32_t launch, int32_t worker,
                                            const WgradQueues& queues) {
  const int32_t begin = participants_of(p, launch, ListKind::kCompute).begin;
  const bool takes = takes_beside(queues, (worker - begin) / p.cluster);
  return {LayerQueue::kFirst, takes, 0, 0, wgrad_cursor(p, launch, queues)};
}

UNIEP_HOST_DEVICE int64_t position_of(const RankProgram& p, const WgradQueues& queues, int64_t wgrad_ticket) {
  return gemm_positions(p, queues.dgrads) + wgrad_ticket * p.cluster;
}

// Whether the next weight gradient's expert has gone through dgrad FC2, as far as tickets tell: those up to the expert
// are taken, and one for each walker, so that its last tiles are under way.
template <typename Counters>
UNIEP_HOST_DEVICE bool is_wgrad_due(const RankProgram& p, int32_t launch, const WgradQueues& queues,
                                    WgradQueueWalk& walk, const Counters& counters) {
  const int64_t wgrad = counters.taken(LayerQueue::kWgrads), firsts = counters.taken(LayerQueue::kFirst);
  if (wgrad >= queues.beside) return false;
  const Task next = list_task(p, launch, ListKind::kCompute, position_of(p, queues, wgrad), walk.cursor);
  const ExpertRange spans{0, spans_before(p, turn_of_expert(p, next.expert) + 1)};
  const int64_t before = tickets_of(p, {Stage::kFirstGemm, spans, 0}) + queues.dgrads.walkers;
  return firsts >= (before < queues.dgrads.first_tickets ? before : queues.dgrads.first_tickets);
}

UNIEP_HOST_DEVICE LayerTicket second_ticket(const RankProgram& p, WgradQueueWalk& walk, int64_t ticket) {
  for (;;) {
    const int64_t tickets = tickets_of(p, of_all_experts(p, Stage::kSecondGemm, walk.chunk));
    if (ticket < walk.chunk_begin + tickets) return {LayerQueue::kSecond, walk.chunk, ticket - walk.chunk_begin};
    walk.chunk_begin += tickets;
    ++walk.chunk;
  }
}

// The next ticket for a walker. `counters` has
//   int64_t taken(LayerQueue) const   how many tickets have been asked for
//   int64_t take(LayerQueue)          asks for the next one
template <typename Counters>
UNIEP_HOST_DEVICE LayerTicket take_layer_ticket(const RankProgram& p, int32_t launch, const WgradQueues& queues,
                                                WgradQueueWalk& walk, Counters&& counters) {
  if (walk.at == LayerQueue::kFirst) {
    if (!(walk.takes_beside && is_wgrad_due(p, launch, queues, walk, counters))) {
      const int64_t first = counters.take(LayerQueue::kFirst);
      if (first < queues.dgrads.first_tickets) return {LayerQueue::kFirst, 0, first};
    }
    walk.at = LayerQueue::kWgrads;
  }
  if (walk.takes_beside) {
    if (counters.taken(LayerQueue::kWgrads) < queues.beside) {
      const int64_t wgrad = counters.take(LayerQueue::kWgrads);
      if (wgrad < queues.wgrad_tickets) return {LayerQueue::kWgrads, 0, wgrad};
    }
    walk.takes_beside = false;
  }
  if (walk.at == LayerQueue::kWgrads) walk.at = LayerQueue::kSecond;
  if (walk.at == LayerQueue::kSecond) {
    const int64_t second = counters.take(LayerQueue::kSecond);
    if (second < queues.dgrads.second_tickets) return second_ticket(p, walk, second);
    walk.at = LayerQueue::kNone;
  }
  const int64_t wgrad = counters.take(LayerQueue::kWgrads);
  if (wgrad < queues.wgrad_tickets) return {LayerQueue::kWgrads, 0, wgrad};
  return {LayerQueue::kNone, 0, 0};
}

// What a ticket is for, for the `worker`-th of those that go together.
UNIEP_HOST_DEVICE Task task_of_ticket(const RankProgram& p, const WgradQueues& queues, const LayerTicket& ticket,
                                      int32_t worker, ListCursor& cursor) {
  if (ticket.queue == LayerQueue::kWgrads) {
    return list_task(p, queues.launch, ListKind::kCompute, position_of(p, queues, ticket.index) + worker, cursor);
  }
  const Stage stage = ticket.queue == LayerQueue::kSecond ? Stage::kSecondGemm : Stage::kFirstGemm;
  return row_gemm_task(p, of_all_experts(p, stage, ticket.chunk), ticket.index * p.cluster + worker);
}

}  // namespace uniep::program
