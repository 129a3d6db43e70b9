#pragma once

#include "program/hopper_rates.h"
#include "program/order.h"

// The two GEMMs of a mixed launch under dynamic queues. Each has a counter of tickets of its own, and a part of the
// workers prefers the second GEMM, as many as its first column chunk needs to keep up. So most of those that work side
// by side on one GEMM stay side by side: they read the same operands at about the same time, while they are in cache.
// (Where every worker takes tiles of both by turns, tiles take up to a sixth longer: docs/layer_tuning.md.)
//
// The second GEMM of a wave is due once the first one's tickets are taken up to that wave. Since others take tickets
// meanwhile, a walker may get one that is not due yet, and then waits for tiles that nobody has taken. Still nobody
// waits for ever, if walkers take no ticket before what the last one waits for has come: then whatever stands before a
// ticket of the first GEMM can run, so all that are taken are run; and all are taken, for who does not prefer the
// second GEMM takes nothing else before. (A walker alone gets no ticket of the second GEMM but what is due.)
namespace uniep::program {

UNIEP_HOST_DEVICE bool has_gemm_queues(const RankProgram& p, int32_t launch) {
  return p.mixed && p.dynamic && p.stages[launch].first_gemm && p.stages[launch].second_gemm;
}

enum class GemmQueue : int32_t { kFirst = 0, kSecond = 1 };
static_assert(kTicketCounters == kListKinds + 2, "a counter for each list and for each of the two GEMMs");

UNIEP_HOST_DEVICE int64_t ticket_counter(int32_t launch, GemmQueue queue) {
  return ticket_counter(launch, static_cast<ListKind>(kListKinds)) + static_cast<int32_t>(queue);
}

// A ticket is for as many positions as workers go together.
struct GemmQueues {
  int64_t first_tickets, second_tickets;
  int32_t walkers;  // workers, or pairs of them, that take tickets
};

// Where one walker stands.
struct GemmQueueWalk {
  bool prefers_second;
  bool firsts_over;
  int32_t chunk, wave;  // of the ticket of the second GEMM that was looked at last
  int64_t chunk_begin;  // the chunk's first ticket
  int64_t wave_end;     // the first ticket behind the wave
};

// What a ticket is for: the positions [index * cluster, (index + 1) * cluster) of a segment.
struct GemmTicket {
  bool found;
  Segment segment;
  int64_t index;
};

UNIEP_HOST_DEVICE int64_t tickets_of(const RankProgram& p, const Segment& s) {
  return segment_length(p, s) / p.cluster;
}

// Of a row GEMM.
UNIEP_HOST_DEVICE Segment of_all_experts(const RankProgram& p, Stage stage, int32_t chunk) {
  return {stage, all_spans(p), chunk};
}

UNIEP_HOST_DEVICE GemmQueues gemm_queues(const RankProgram& p, int32_t launch) {
  const Participants who = participants_of(p, launch, ListKind::kCompute);
  GemmQueues queues{tickets_of(p, of_all_experts(p, Stage::kFirstGemm, 0)), 0, (who.end - who.begin) / p.cluster};
  for (int32_t chunk = 0; chunk < p.chunks; ++chunk) {
    queues.second_tickets += tickets_of(p, of_all_experts(p, Stage::kSecondGemm, chunk));
  }
  return queues;
}

// Positions at the begin of the compute list that the two queues stand for.
UNIEP_HOST_DEVICE int64_t gemm_positions(const RankProgram& p, const GemmQueues& queues) {
  return (queues.first_tickets + queues.second_tickets) * p.cluster;
}

inline constexpr int32_t kShareParts = 16;  // order.second_share

// As many as order.second_share says, else as the second GEMM's first column chunk takes of the time that it and the
// first GEMM take.
UNIEP_HOST_DEVICE bool prefers_second(const RankProgram& p, int32_t walker, int32_t walkers) {
  const bool forward = p.direction == Direction::kForward;
  const int64_t hidden = p.wgrad_fc2.rows, intermediate = p.wgrad_fc2.columns;
  const int64_t first = (forward ? 2 : 1) * intermediate * (hidden + kTileOverheadColumns);
  const int64_t second = p.chunk_column[1] * ((forward ? 1 : 2) * intermediate + kTileOverheadColumns);
  int64_t count = (walkers * second + (first + second) / 2) / (first + second);
  if (p.second_share > 0) count = (walkers * p.second_share + kShareParts / 2) / kShareParts;
  if (count > walkers - 1) count = walkers - 1;
  if (count < 1) count = 1;
  return (walker + 1) * count / walkers > walker * count / walkers;
}

UNIEP_HOST_DEVICE GemmQueueWalk begin_walk(const RankProgram& p, int32_t launch, int32_t worker,
                                           const GemmQueues& queues) {
  const int32_t begin = participants_of(p, launch, ListKind::kCompute).begin;
  const Segment first_wave{Stage::kSecondGemm, spans_of_wave(p, 0), 0};
  return {prefers_second(p, (worker - begin) / p.cluster, queues.walkers), false, 0, 0, 0, tickets_of(p, first_wave)};
}

// The second GEMM's tickets are looked at in ascending order.
UNIEP_HOST_DEVICE void seek_second(const RankProgram& p, GemmQueueWalk& walk, int64_t ticket) {
  while (ticket >= walk.wave_end) {
    if (++walk.wave == gemm_waves(p)) {
      walk.wave = 0;
      ++walk.chunk;
      walk.chunk_begin = walk.wave_end;
    }
    walk.wave_end += tickets_of(p, {Stage::kSecondGemm, spans_of_wave(p, walk.wave), walk.chunk});
  }
}

// How many tickets of the first GEMM must have been taken: those up to the wave, and one for each walker, so that the
// wave's last tiles are under way.
UNIEP_HOST_DEVICE int64_t firsts_before_second(const RankProgram& p, const GemmQueues& queues,
                                               const GemmQueueWalk& walk) {
  if (walk.chunk > 0) return queues.first_tickets;
  const ExpertRange spans{0, spans_of_wave(p, walk.wave).end};
  const int64_t tickets = tickets_of(p, {Stage::kFirstGemm, spans, 0}) + queues.walkers;
  return tickets < queues.first_tickets ? tickets : queues.first_tickets;
}

// Whether a walker that prefers the second GEMM should take of it now. Others may be faster: then it gets a later
// ticket.
template <typename Counters>
UNIEP_HOST_DEVICE bool is_second_due(const RankProgram& p, const GemmQueues& queues, GemmQueueWalk& walk,
                                     const Counters& counters) {
  const int64_t second = counters.taken(GemmQueue::kSecond), firsts = counters.taken(GemmQueue::kFirst);
  if (second >= queues.second_tickets) return false;
  seek_second(p, walk, second);
  return firsts >= firsts_before_second(p, queues, walk);
}

// The next ticket for a walker; none when both queues are at their end. `counters` has
//   int64_t taken(GemmQueue) const   how many tickets have been asked for
//   int64_t take(GemmQueue)          asks for the next one
template <typename Counters>
UNIEP_HOST_DEVICE GemmTicket take_gemm_ticket(const RankProgram& p, const GemmQueues& queues, GemmQueueWalk& walk,
                                              Counters&& counters) {
  if (!walk.firsts_over && !(walk.prefers_second && is_second_due(p, queues, walk, counters))) {
    const int64_t first = counters.take(GemmQueue::kFirst);
    if (first < queues.first_tickets) return {true, of_all_experts(p, Stage::kFirstGemm, 0), first};
    walk.firsts_over = true;
  }
  const int64_t second = counters.take(GemmQueue::kSecond);
  if (second >= queues.second_tickets) return {};
  seek_second(p, walk, second);
  return {true, of_all_experts(p, Stage::kSecondGemm, walk.chunk), second - walk.chunk_begin};
}

}  // namespace uniep::program
