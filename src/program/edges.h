#pragma once

#include "program/rank_program.h"

// The edges between tiles: what a task waits for, and what it signals when its data is in place. Counters are local to
// a rank and count tiles or rows; flags go between ranks, have one writer each and hold the call's epoch.
namespace uniep::program {

// ---- Where counters and flags lie
// ------------------------------------------------------------------------------------

enum class CounterSpace : int32_t {
  kFullRows = 0,      // [block] rows of x or dy (operand 0) that are in place, padding included
  kFirstTiles,        // [block] column tiles of the first GEMM that are done
  kSecondTiles,       // [block, chunk] column tiles of the second GEMM that are done
  kAgentsFinished,    // [launch] agents that have walked all their lists
  kTickets,           // [launch, queue] next position of a dynamic queue
  kExpertFirstTiles,  // [local expert] backward: column tiles of the first GEMM that are done, of all row blocks
  kExpertRows,        // [local expert] backward: rows of x again (operand 1) that are in place, padding included
};
inline constexpr int kCounterSpaces = 7;

enum class FlagSpace : int32_t {
  kArrive = 0,  // [peer] the peer's inputs are in place and its buffers are free
  kDone,        // [peer] the peer has made its last access to this rank's memory
  kPushed,      // [operand, source, block] the source's rows of the block are in place
  kCombined,    // [producer, unit, chunk] its rows (unit = its row block) or sums (unit = my token block) are in place
};
inline constexpr int kFlagSpaces = 4;

// Offsets into one rank's counter bank and flag array; flags are laid out alike on all ranks, since peers write them.
struct SignalLayout {
  int64_t counters[kCounterSpaces];
  int64_t counter_total;
  int64_t flags[kFlagSpaces];
  int64_t flag_total;
};

UNIEP_HOST_DEVICE int32_t combine_units(const RankProgram& p) {
  return p.combine_groups > 0 ? p.most_token_blocks : p.most_blocks;
}

UNIEP_HOST_DEVICE SignalLayout signal_layout(const RankProgram& p) {
  SignalLayout layout;
  const int64_t blocks = p.most_blocks;
  const int64_t counter_sizes[kCounterSpaces] = {
      blocks,          blocks,         blocks * kMaxColumnChunks, kMaxLaunches, int64_t{kMaxLaunches} * kTicketCounters,
      p.local_experts, p.local_experts};
  const int64_t flag_sizes[kFlagSpaces] = {p.ranks, p.ranks, blocks * kMaxOperands * p.ranks,
                                           static_cast<int64_t>(p.ranks) * combine_units(p) * kMaxColumnChunks};
  layout.counter_total = 0;
  for (int space = 0; space < kCounterSpaces; ++space) {
    layout.counters[space] = layout.counter_total;
    layout.counter_total += counter_sizes[space];
  }
  layout.flag_total = 0;
  for (int space = 0; space < kFlagSpaces; ++space) {
    layout.flags[space] = layout.flag_total;
    layout.flag_total += flag_sizes[space];
  }
  return layout;
}

UNIEP_HOST_DEVICE int64_t pushed_flag(const RankProgram& p, int32_t operand, int32_t source, int32_t block) {
  return (static_cast<int64_t>(operand) * p.ranks + source) * p.most_blocks + block;
}
UNIEP_HOST_DEVICE int64_t combined_flag(const RankProgram& p, int32_t producer, int32_t unit, int32_t chunk) {
  return (static_cast<int64_t>(producer) * combine_units(p) + unit) * kMaxColumnChunks + chunk;
}
UNIEP_HOST_DEVICE int64_t second_counter(int32_t block, int32_t chunk) {
  return static_cast<int64_t>(block) * kMaxColumnChunks + chunk;
}

// ---- Waits
// -----------------------------------------------------------------------------------------------------------

struct CounterWait {
  CounterSpace space;
  int64_t index;
  uint32_t threshold;
};
struct FlagWait {
  FlagSpace space;
  int64_t index;  // the flag must hold the call's epoch
};

UNIEP_HOST_DEVICE int32_t block_rows(const RankProgram& p, int32_t global_expert, int32_t m) {
  const RowRange range = rows_of_block(p, global_expert, m);
  return range.padded_end - range.begin;
}

UNIEP_HOST_DEVICE int32_t chunk_of_tile(const RankProgram& p, int32_t column_tile) {
  int32_t chunk = 0;
  while (p.chunk_tile[chunk + 1] <= column_tile) ++chunk;
  return chunk;
}

UNIEP_HOST_DEVICE int32_t tiles_in_chunk(const RankProgram& p, int32_t chunk) {
  return p.chunk_tile[chunk + 1] - p.chunk_tile[chunk];
}

// Ranks that have rows in a range of an expert's rows.
template <typename Visit>
UNIEP_HOST_DEVICE void for_each_source(const RankProgram& p, int32_t global_expert, RowRange range, Visit&& visit) {
  for (int32_t source = 0; source < p.ranks; ++source) {
    const RowRange part = rows_from_source(p, global_expert, range, source);
    if (part.begin < part.end) visit(source);
  }
}

// Ranks that have rows in a block of this rank.
template <typename Visit>
UNIEP_HOST_DEVICE void for_each_source(const RankProgram& p, int32_t global_expert, int32_t m, Visit&& visit) {
  for_each_source(p, global_expert, rows_of_block(p, global_expert, m), visit);
}

// What a kPull or kReceive task fills (a receive: the whole block).
UNIEP_HOST_DEVICE int32_t operand_of(const RankProgram& p, const Task& task) {
  return task.stage == Stage::kPull ? task.n / p.pull_parts : task.n;
}
UNIEP_HOST_DEVICE RowRange rows_of_dispatch(const RankProgram& p, const Task& task) {
  const int32_t expert = p.first_expert + task.expert;
  if (task.stage == Stage::kReceive) return rows_of_block(p, expert, task.m);
  return rows_of_part(p, expert, task.m, task.n % p.pull_parts, p.pull_parts);
}

// The slots of a destination's token block that lead to rows of this rank: visit(token, slot, row).
template <typename Visit>
UNIEP_HOST_DEVICE void for_each_row_of_tokens(const RankProgram& p, int32_t destination, int32_t token_block,
                                              Visit&& visit) {
  const int32_t begin = token_block * kTokenBlock;
  const int32_t limit = p.tokens_of_rank[destination];
  const int32_t end = begin + kTokenBlock < limit ? begin + kTokenBlock : limit;
  for (int32_t token = begin; token < end; ++token) {
    for (int32_t slot = 0; slot < p.topk; ++slot) {
      const int32_t row = row_here(p, destination, first_entry(p, destination, token) + slot);
      if (row >= 0) visit(token, slot, row);
    }
  }
}

// The local expert that a routed row of this rank belongs to. Empty experts share their start with their successor, so
// the last expert that starts at or before the row is the one that holds it.
UNIEP_HOST_DEVICE int32_t local_expert_holding(const RankProgram& p, int32_t row) {
  int32_t low = 0, high = p.local_experts;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (p.segment_start[p.first_expert + middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The row block of this rank that holds a routed row, whatever its expert.
UNIEP_HOST_DEVICE int32_t block_holding(const RankProgram& p, int32_t row) {
  if (p.tile_m == kRowAlignment) return row / kRowAlignment;  // segments are whole blocks
  return block_of_row(p, p.first_expert + local_expert_holding(p, row), row);
}

// Calls wait(CounterWait) and wait(FlagWait) for everything that must hold before the task may touch data. The same
// wait may come more than once.
template <typename Wait>
UNIEP_HOST_DEVICE void for_each_wait(const RankProgram& p, const Task& task, Wait&& wait) {
  const int32_t global_expert = p.first_expert + task.expert;
  const auto arrive = [&](int32_t peer) { wait(FlagWait{FlagSpace::kArrive, peer}); };
  if (!task.has_tile()) return;
  switch (task.stage) {
    case Stage::kPull:
      for_each_source(p, global_expert, rows_of_dispatch(p, task), arrive);
      break;
    case Stage::kPush:
      arrive(p.rank_of_expert[task.expert]);
      break;
    case Stage::kReceive: {
      const int32_t block = p.block_begin[task.expert] + task.m;
      for_each_source(p, global_expert, task.m, [&](int32_t source) {
        wait(FlagWait{FlagSpace::kPushed, pushed_flag(p, task.n, source, block)});
      });
      break;
    }
    case Stage::kFirstGemm: {
      if (p.rows_in_place) break;
      const int32_t block = p.block_begin[task.expert] + task.m;
      wait(CounterWait{CounterSpace::kFullRows, block, static_cast<uint32_t>(block_rows(p, global_expert, task.m))});
      break;
    }
    case Stage::kSecondGemm: {
      const int32_t block = p.block_begin[task.expert] + task.m;
      wait(CounterWait{CounterSpace::kFirstTiles, block, static_cast<uint32_t>(p.first_tiles)});
      if (p.epilogue_combine) for_each_source(p, global_expert, task.m, arrive);
      break;
    }
    case Stage::kWgradFc2:
    case Stage::kWgradFc1: {
      // Rows of dy are full before: each tile of the first GEMM has waited for those of its block.
      const int32_t blocks = p.block_begin[task.expert + 1] - p.block_begin[task.expert];
      if (blocks == 0) break;
      wait(CounterWait{CounterSpace::kExpertFirstTiles, task.expert, static_cast<uint32_t>(blocks * p.first_tiles)});
      if (task.stage == Stage::kWgradFc1 && p.operands == 2) {
        wait(CounterWait{CounterSpace::kExpertRows, task.expert,
                         static_cast<uint32_t>(round_up(p.expert_rows[global_expert], kRowAlignment))});
      }
      break;
    }
    case Stage::kSend: {
      const int32_t block = p.block_begin[task.expert] + task.m;
      wait(CounterWait{CounterSpace::kSecondTiles, second_counter(block, task.n),
                       static_cast<uint32_t>(tiles_in_chunk(p, task.n))});
      for_each_source(p, global_expert, task.m, arrive);
      break;
    }
    case Stage::kGroupSend: {
      for_each_row_of_tokens(p, task.expert, task.m, [&](int32_t, int32_t, int32_t row) {
        wait(CounterWait{CounterSpace::kSecondTiles, second_counter(block_holding(p, row), task.n),
                         static_cast<uint32_t>(tiles_in_chunk(p, task.n))});
      });
      arrive(task.expert);
      break;
    }
    case Stage::kReduce: {
      const int32_t begin = task.m * kTokenBlock;
      const int32_t end = begin + kTokenBlock < p.tokens ? begin + kTokenBlock : p.tokens;
      for (int32_t position = begin; position < end; ++position) {
        const int64_t first = static_cast<int64_t>(summed_token(p, position)) * p.topk;
        for (int64_t entry = first; entry < first + p.topk; ++entry) {
          const int32_t expert = p.expert_of_slot[entry];
          if (expert < 0) continue;
          const int32_t unit = p.combine_groups > 0 ? task.m : block_of_row(p, expert, p.row_of_slot[entry]);
          wait(FlagWait{FlagSpace::kCombined, combined_flag(p, p.rank_of_expert[expert], unit, task.n)});
        }
      }
      break;
    }
  }
}

// ---- Signals
// ---------------------------------------------------------------------------------------------------------

struct CounterSignal {
  CounterSpace space;
  int64_t index;
  uint32_t amount;
};
struct FlagSignal {
  int32_t peer;
  FlagSpace space;
  int64_t index;
};
// Whoever brings this kSecondTiles counter to the threshold stores the flags.
struct LastArriver {
  int64_t counter;
  uint32_t threshold;
};

// Rows of a block that are in place: for the first GEMM, which waits by block, or of x again, which only FC1's weight
// gradient reads.
UNIEP_HOST_DEVICE CounterSignal full_rows(int32_t operand, int32_t local_expert, int32_t block, uint32_t rows) {
  if (operand == 0) return {CounterSpace::kFullRows, block, rows};
  return {CounterSpace::kExpertRows, local_expert, rows};
}
// A row that deduplicated dispatch has filled from another block.
UNIEP_HOST_DEVICE CounterSignal full_row(const RankProgram& p, int32_t operand, int32_t row) {
  if (operand == 0) return full_rows(operand, -1, block_holding(p, row), 1u);
  return full_rows(operand, local_expert_holding(p, row), -1, 1u);
}

// Calls count(CounterSignal) for every local counter that the task advances.
template <typename Count>
UNIEP_HOST_DEVICE void for_each_counter_signal(const RankProgram& p, const Task& task, Count&& count) {
  const int32_t global_expert = p.first_expert + task.expert;
  if (!task.has_tile()) return;
  switch (task.stage) {
    case Stage::kPull:
    case Stage::kReceive: {
      const int32_t block = p.block_begin[task.expert] + task.m, operand = operand_of(p, task);
      const RowRange range = rows_of_dispatch(p, task);
      uint32_t own = static_cast<uint32_t>(range.padded_end - (p.dedup ? range.end : range.begin));
      const RowRange whole = rows_of_block(p, global_expert, task.m);
      for (int32_t row = range.begin; p.dedup && row < range.end; ++row) {
        if (!is_primary_row(p, row)) continue;
        for_each_filled_row(p, row, [&](int32_t filled) {
          if (filled >= whole.begin && filled < whole.end) {
            ++own;
          } else {
            count(full_row(p, operand, filled));
          }
        });
      }
      if (own > 0) count(full_rows(operand, task.expert, block, own));
      break;
    }
    case Stage::kFirstGemm:
      count(CounterSignal{CounterSpace::kFirstTiles, p.block_begin[task.expert] + task.m, 1u});
      if (p.direction == Direction::kBackward) count(CounterSignal{CounterSpace::kExpertFirstTiles, task.expert, 1u});
      break;
    case Stage::kSecondGemm:
      count(CounterSignal{CounterSpace::kSecondTiles,
                          second_counter(p.block_begin[task.expert] + task.m, chunk_of_tile(p, task.n)), 1u});
      break;
    default:
      break;
  }
}

// Calls store(FlagSignal) for every flag that the task stores; under an epilogue combine the last column tile of a
// block and chunk stores them (see is_flag_guarded).
template <typename Store>
UNIEP_HOST_DEVICE void for_each_flag_signal(const RankProgram& p, const Task& task, Store&& store) {
  const int32_t global_expert = p.first_expert + task.expert;
  if (!task.has_tile()) return;
  switch (task.stage) {
    case Stage::kPush: {
      const int32_t destination = p.rank_of_expert[task.expert];
      store(FlagSignal{destination, FlagSpace::kPushed,
                       pushed_flag(p, task.n, p.rank, p.expert_block[task.expert] + task.m)});
      break;
    }
    case Stage::kSecondGemm:
    case Stage::kSend: {
      if (task.stage == Stage::kSecondGemm && !p.epilogue_combine) break;
      const int32_t chunk = task.stage == Stage::kSend ? task.n : chunk_of_tile(p, task.n);
      const int32_t block = p.block_begin[task.expert] + task.m;
      for_each_source(p, global_expert, task.m, [&](int32_t source) {
        store(FlagSignal{source, FlagSpace::kCombined, combined_flag(p, p.rank, block, chunk)});
      });
      break;
    }
    case Stage::kGroupSend:
      store(FlagSignal{task.expert, FlagSpace::kCombined, combined_flag(p, p.rank, task.m, task.n)});
      break;
    default:
      break;
  }
}

// Whether a task returns the dprobs of its rows to their tokens' ranks, before the flag of column chunk 0, behind which
// they are read. With the epilogue combine the first column tile of a row block does: it has waited for all sums.
UNIEP_HOST_DEVICE bool returns_prob_gradients(const RankProgram& p, const Task& task) {
  if (p.direction == Direction::kForward || task.n != 0 || !task.has_tile()) return false;
  if (task.stage == Stage::kSecondGemm) return p.epilogue_combine;
  return task.stage == Stage::kSend || task.stage == Stage::kGroupSend;
}

// Whether a task's flags are stored only by whoever brings its counter to the threshold.
UNIEP_HOST_DEVICE bool is_flag_guarded(const RankProgram& p, const Task& task) {
  return task.stage == Stage::kSecondGemm && p.epilogue_combine;
}
UNIEP_HOST_DEVICE LastArriver flag_guard(const RankProgram& p, const Task& task) {
  const int32_t chunk = chunk_of_tile(p, task.n);
  return {second_counter(p.block_begin[task.expert] + task.m, chunk), static_cast<uint32_t>(tiles_in_chunk(p, chunk))};
}

}  // namespace uniep::program
