#include <algorithm>

#include "program/program_tables.h"
#include "sim/event_run.h"

// What tasks signal, and who goes on then. Where one rank stands for all, its peers signal it when it signals them.
namespace uniep::sim {
namespace {

// When a local expert of a rank comes there.
int32_t turn_of_expert_on(const RankProgram& p, int32_t rank, int32_t local_expert) {
  int32_t turn = 0;
  while (expert_of_turn(p, rank, turn) != local_expert) ++turn;
  return turn;
}

}  // namespace

void EventRun::add(int32_t rank, int64_t signal, uint32_t amount, double now, double latency) {
  RankState& state = ranks_[rank];
  state.signals[signal] += amount;
  const uint32_t value = state.signals[signal];
  int32_t* link = &state.waiting[signal];
  while (*link >= 0) {
    Agent& agent = agents_[*link];
    if (value < agent.waits[agent.satisfied].threshold) {
      link = &agent.next_waiting;
      continue;
    }
    push_event(now + machine_.time.flag + latency, Kind::kBegin, *link);
    *link = agent.next_waiting;
  }
}

void EventRun::set_flag(int32_t rank, int64_t flag, double now, double latency) {
  const int64_t signal = layout_.counter_total + flag;
  if (ranks_[rank].signals[signal] == 0) add(rank, signal, 1, now, latency);
}

void EventRun::signal_task(int32_t rank, const Task& task, double now) {
  const RankProgram& p = program(rank);
  if (!task.has_tile()) return;
  bool flags = !is_flag_guarded(p, task);
  if (task.stage == Stage::kPull || task.stage == Stage::kReceive) {
    const CopyWork& work = costs_[rank].copy(task);
    for (int32_t i = work.signals_begin; i < work.signals_end; ++i) {
      const RankSignal& signal = costs_[rank].signals()[i];
      add(rank, signal.counter, signal.amount, now, 0);
    }
  } else {
    for_each_counter_signal(p, task, [&](const CounterSignal& signal) {
      const int64_t counter = layout_.counters[static_cast<int>(signal.space)] + signal.index;
      add(rank, counter, signal.amount, now, 0);
      if (is_flag_guarded(p, task)) flags = ranks_[rank].signals[counter] == flag_guard(p, task).threshold;
    });
  }
  if (!flags) return;
  if (options_.one_rank) {
    mirror_flags(task, now);
  } else {
    store_flags(rank, task, now);
  }
}

void EventRun::store_flags(int32_t rank, const Task& task, double now) {
  for_each_flag_signal(program(rank), task, [&](const FlagSignal& signal) {
    set_flag(signal.peer, layout_.flags[static_cast<int>(signal.space)] + signal.index, now,
             links_.latency(rank, signal.peer));
  });
}

// Rank 0's peers do at the same time what it does, on their own rows: a block stands for the block of the same number
// of the expert of the same turn there, and its last one for all that they have more.
void EventRun::mirror_flags(const Task& task, double now) {
  const RankProgram& p = program(0);
  const auto combined = [&](int32_t producer, int32_t unit, int32_t chunk) {
    set_flag(0, layout_.flags[static_cast<int>(FlagSpace::kCombined)] + combined_flag(p, producer, unit, chunk), now,
             links_.latency(0, producer));
  };
  if (task.stage == Stage::kSecondGemm || task.stage == Stage::kSend) {
    if (task.stage == Stage::kSecondGemm && !p.epilogue_combine) return;
    const int32_t chunk = task.stage == Stage::kSend ? task.n : chunk_of_tile(p, task.n);
    const int32_t mine = p.block_begin[task.expert + 1] - p.block_begin[task.expert];
    for (int32_t producer = 0; producer < p.ranks; ++producer) {
      const int32_t expert = producer * p.local_experts + expert_of_turn(p, producer, turn_of_expert(p, task.expert));
      const int32_t blocks = blocks_of_rows(p.expert_rows[expert], p.tile_m);
      const int32_t end = task.m == mine - 1 ? blocks : std::min(task.m + 1, blocks);
      for (int32_t m = task.m; m < end; ++m) combined(producer, p.expert_block[expert] + m, chunk);
    }
    return;
  }
  if (task.stage == Stage::kGroupSend) {
    const int32_t producer = (p.ranks - task.expert) % p.ranks;
    combined(producer, task.m, task.n);  // all ranks have as many tokens
    return;
  }
  if (task.stage != Stage::kPush) return;
  const int32_t destination = p.rank_of_expert[task.expert];
  const int32_t source = (p.ranks - destination) % p.ranks;  // rank 0 turns to its peers in their order
  const int32_t theirs = task.expert - destination * p.local_experts;
  const PushRun mine = push_run(p, destination, theirs);
  const int32_t local = expert_of_turn(p, turn_of_expert_on(p, destination, theirs));
  const int32_t expert = p.first_expert + local, count = p.counts[source * p.experts + expert];
  if (count == 0) return;
  const int32_t offset = p.source_offset[source * p.experts + expert];
  const int32_t first = offset / p.tile_m, last = (offset + count - 1) / p.tile_m;
  const int32_t at = task.m - mine.first;
  const int32_t end = at == mine.blocks - 1 ? last + 1 : std::min(first + at + 1, last + 1);
  for (int32_t m = first + at; m < end; ++m) {
    set_flag(0,
             layout_.flags[static_cast<int>(FlagSpace::kPushed)] +
                 pushed_flag(p, task.n, source, p.expert_block[expert] + m),
             now, links_.latency(0, source));
  }
}

// Flags of peers' blocks and pushes that rank 0 has no counterpart of.
void EventRun::mirror_what_nobody_makes() {
  const RankProgram& p = program(0);
  for (int32_t turn = 0; turn < p.local_experts; ++turn) {
    const int32_t local = expert_of_turn(p, turn);
    const bool none = p.combine_groups == 0 && p.block_begin[local + 1] == p.block_begin[local];
    for (int32_t peer = 0; peer < p.ranks; ++peer) {
      const int32_t theirs = peer * p.local_experts + expert_of_turn(p, peer, turn);
      for (int32_t m = 0; none && m < blocks_of_rows(p.expert_rows[theirs], p.tile_m); ++m) {
        for (int32_t chunk = 0; chunk < p.chunks; ++chunk) {
          set_flag(0,
                   layout_.flags[static_cast<int>(FlagSpace::kCombined)] +
                       combined_flag(p, peer, p.expert_block[theirs] + m, chunk),
                   0, 0);
        }
      }
      const int32_t source = (p.ranks - peer) % p.ranks, expert = p.first_expert + local;
      if (!p.push || p.counts[theirs] > 0 || p.counts[source * p.experts + expert] == 0) continue;
      const int32_t offset = p.source_offset[source * p.experts + expert];
      for (int32_t m = offset / p.tile_m; m <= (offset + p.counts[source * p.experts + expert] - 1) / p.tile_m; ++m) {
        for (int32_t operand = 0; operand < p.operands; ++operand) {
          set_flag(0,
                   layout_.flags[static_cast<int>(FlagSpace::kPushed)] +
                       pushed_flag(p, operand, source, p.expert_block[expert] + m),
                   0, 0);
        }
      }
    }
  }
}

}  // namespace uniep::sim
