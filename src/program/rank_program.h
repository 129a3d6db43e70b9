#pragma once

#include "model/row_table.h"
#include "program/stage.h"
#include "program/table_list.h"

// The Program of one rank, for one call: everything that the order of tiles and the edges between them depend on, as
// plain numbers and tables, so that the functions of order.h and edges.h run on the host and on the device alike.
namespace uniep::program {

inline constexpr int kMaxColumnChunks = 8;
inline constexpr int kMaxLaunches = 6;
inline constexpr int kMaxOperands = 2;     // rows dispatched in one call: x or dy, and x again
inline constexpr int kTicketCounters = 7;  // of a launch: one for each list of order.h, two for gemm_queues.h
inline constexpr int kTokenBlock = 32;     // tokens of one combine-reduce tile

// Which stages a launch runs.
struct LaunchStages {
  bool dispatch = false;
  bool dispatch_again = false;  // of x in backward, which FC1's weight gradient alone reads
  bool first_gemm = false;
  bool second_gemm = false;
  bool wgrad_fc2 = false;
  bool wgrad_fc1 = false;
  bool combine = false;
};

// The output tile grid of a weight gradient: ceil(rows / tile_m) x ceil(columns / tile_n).
struct WgradGrid {
  int32_t rows, columns, tile_m, tile_n;
  UNIEP_HOST_DEVICE int32_t m_tiles() const { return (rows + tile_m - 1) / tile_m; }
  UNIEP_HOST_DEVICE int32_t n_tiles() const { return (columns + tile_n - 1) / tile_n; }
};

// Of one rank's tokens, [T, K] each.
struct SlotTables {
  const int32_t* expert_of_slot;
  const int32_t* row_of_slot;
};

struct RankProgram {
  // The layer and this rank.
  Direction direction;
  int32_t rank, ranks, experts, topk, tokens;
  int32_t local_experts, first_expert;  // this rank's experts are [first_expert, first_expert + local_experts)
  int32_t operands;                     // 1, or 2 when x is dispatched again; 0: rows are in place
  int32_t combine_groups;
  WgradGrid wgrad_fc2, wgrad_fc1;

  // The mapping (see docs/schedule.md).
  bool push, dedup, epilogue_combine, on_sms, dynamic, mixed, source_rotation, heavy_first;
  bool rows_in_place;                       // before the call: the first GEMM does not wait for them
  int8_t wgrad_reserve;                     // backward.wgrad=mixed: backward.wgrad_reserve; else negative
  int8_t second_share;                      // order.second_share
  int32_t workers;                          // that take part: all but the reserved ones, unless these are lent
  int32_t lent_workers;                     // the last ones of them, which may come late, leave early, or never come
  int32_t dispatch_workers;                 // [0, dispatch_workers) copy first, when on_sms
  int32_t relay_workers;                    // the next ones receive first; 0: those that push do
  int32_t combine_workers, reduce_workers;  // the last ones, dedicated, when on_sms
  int32_t wave_experts, waves, raster;
  int32_t wave_blocks;  // of the row GEMMs: whole clusters of row blocks of one expert; 0: whole experts
  int32_t cluster;      // workers that take a pair of neighbouring GEMM positions together: 1 or 2 (see tile_order.h)
  int32_t pull_parts;   // a row block is pulled in so many tiles
  int32_t tile_m;
  int32_t first_tiles;  // column tiles of the first GEMM
  int32_t chunks;       // non-empty column chunks of the second GEMM
  int32_t chunk_column[kMaxColumnChunks + 1];
  int32_t chunk_tile[kMaxColumnChunks + 1];  // first column tile of a chunk; the last entry counts all
  int32_t second_tile_n;
  int32_t launches;
  LaunchStages stages[kMaxLaunches];
  int64_t late_position;  // GEMM tiles before this position are not for the workers that dispatch first

  // Tables, all from the Placement.
#define UNIEP_TABLE(type, name, entries) const type* name;
  UNIEP_EXPERT_TABLES(UNIEP_TABLE)
  UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
  UNIEP_RANK_TABLES(UNIEP_TABLE)
  UNIEP_SLOT_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
  // Where row_here() looks, on a device and on a host.
  const int64_t* source_begin;
#ifdef __CUDA_ARCH__
  const int32_t* row_of_source;
#else
  union {
    const int32_t* row_of_source;
    const SlotTables* slots_of_rank;  // [W]
  };
#endif
  int32_t most_blocks;        // of any rank
  int32_t most_token_blocks;  // of any rank
};

// Workers that are there from begin to end.
UNIEP_HOST_DEVICE int32_t kept_workers(const RankProgram& p) {
  return p.workers - p.lent_workers;
}

// Those that dispatch or relay before they join the GEMM tiles.
UNIEP_HOST_DEVICE int32_t first_copying_workers(const RankProgram& p) {
  return p.dispatch_workers + p.relay_workers;
}

// Row blocks. A block holds tile_m rows of one expert; the last one of an expert reaches to the end of the padding.
UNIEP_HOST_DEVICE int32_t blocks_of_rows(int32_t rows, int32_t tile_m) {
  return (rows + tile_m - 1) / tile_m;
}

UNIEP_HOST_DEVICE int32_t local_blocks(const RankProgram& p) {
  return p.block_begin[p.local_experts];
}

// The token that comes `position`-th among the sums; a token block is kTokenBlock of these positions. With groups,
// whose ranks send sums by blocks, tokens ascend.
UNIEP_HOST_DEVICE int32_t summed_token(const RankProgram& p, int32_t position) {
  return p.combine_groups > 0 ? position : p.token_order[position];
}

struct RowRange {
  int32_t begin;       // row on the rank
  int32_t end;         // after the last routed row
  int32_t padded_end;  // after the last row of padding that belongs to the block
};

// The rows of block `m` of an expert on its owner.
UNIEP_HOST_DEVICE RowRange rows_of_block(const RankProgram& p, int32_t expert, int32_t m) {
  const int32_t start = p.segment_start[expert];
  const int32_t count = p.expert_rows[expert];
  const int32_t blocks = blocks_of_rows(count, p.tile_m);
  const int32_t first = m * p.tile_m;
  const bool last = m == blocks - 1;
  const int32_t padded = static_cast<int32_t>(round_up(count, kRowAlignment));
  return {start + first, start + (last ? count : first + p.tile_m), start + (last ? padded : first + p.tile_m)};
}

// The rows of a block that part `part` of `parts` pulls: equal shares of tile_m, the last with the rest of the padding.
UNIEP_HOST_DEVICE RowRange rows_of_part(const RankProgram& p, int32_t expert, int32_t m, int32_t part, int32_t parts) {
  const RowRange block = rows_of_block(p, expert, m);
  const int32_t share = (p.tile_m + parts - 1) / parts;
  const int32_t begin = block.begin + part * share;
  const int32_t limit = begin + share;
  RowRange rows;
  rows.begin = begin < block.padded_end ? begin : block.padded_end;
  rows.end = limit < block.end ? limit : block.end;
  rows.padded_end = part == parts - 1 || limit > block.padded_end ? block.padded_end : limit;
  if (rows.end < rows.begin) rows.end = rows.begin;
  return rows;
}

// Those of a range of an expert's rows that came from one source; empty when begin >= end.
UNIEP_HOST_DEVICE RowRange rows_from_source(const RankProgram& p, int32_t expert, RowRange block, int32_t source) {
  const int32_t begin = p.segment_start[expert] + p.source_offset[source * p.experts + expert];
  const int32_t end = begin + p.counts[source * p.experts + expert];
  RowRange part;
  part.begin = begin > block.begin ? begin : block.begin;
  part.end = end < block.end ? end : block.end;
  part.padded_end = part.end;
  return part;
}

// The block of this rank that holds a routed row of a local expert.
UNIEP_HOST_DEVICE int32_t block_of_row(const RankProgram& p, int32_t global_expert, int32_t row) {
  return p.expert_block[global_expert] + (row - p.segment_start[global_expert]) / p.tile_m;
}

// Which rows of this rank the slots of a row's token take. A host has the tables of all ranks, and finds them in those
// of the token's rank. A device has not: a placement gives it row_of_source, which has an entry for each slot of all
// ranks.
UNIEP_HOST_DEVICE int64_t first_entry(const RankProgram& p, [[maybe_unused]] int32_t rank, int32_t token) {
#ifdef __CUDA_ARCH__
  return p.source_begin[rank] + static_cast<int64_t>(token) * p.topk;
#else
  return static_cast<int64_t>(token) * p.topk;
#endif
}

// The row of an entry from first_entry() on, or -1 where its slot takes none here.
UNIEP_HOST_DEVICE int32_t row_here(const RankProgram& p, [[maybe_unused]] int32_t rank, int64_t entry) {
#ifdef __CUDA_ARCH__
  return p.row_of_source[entry];
#else
  const SlotTables& slots = p.slots_of_rank[rank];
  const int32_t expert = slots.expert_of_slot[entry];
  const bool here = expert >= p.first_expert && expert < p.first_expert + p.local_experts;
  return here ? slots.row_of_slot[entry] : -1;
#endif
}

// Deduplication: a token travels to a rank once, as the first of its rows there; that row is its primary one.
UNIEP_HOST_DEVICE bool is_primary_row(const RankProgram& p, int32_t row) {
  if (!p.dedup) return true;
  const RowSource& source = p.rows[row];
  const int64_t entry = first_entry(p, source.rank, source.token);
  bool is_first = true;
  for (int32_t slot = 0; slot < p.topk; ++slot) {  // without an early end, so that the loads do not wait for each other
    const int32_t other = row_here(p, source.rank, entry + slot);
    is_first &= other < 0 || other >= row;
  }
  return is_first;
}

// Calls visit(row) for every row of this rank that the copy of `row` fills: the row itself, and with deduplication the
// token's other rows here.
template <typename Visit>
UNIEP_HOST_DEVICE void for_each_filled_row(const RankProgram& p, int32_t row, Visit&& visit) {
  visit(row);
  if (!p.dedup) return;
  const RowSource& source = p.rows[row];
  const int64_t entry = first_entry(p, source.rank, source.token);
  for (int32_t slot = 0; slot < p.topk; ++slot) {
    const int32_t other = row_here(p, source.rank, entry + slot);
    if (other >= 0 && other != row) visit(other);
  }
}

// On the source: whether the row that a slot takes on its destination is the token's primary row there.
UNIEP_HOST_DEVICE bool is_primary_slot(const RankProgram& p, int32_t token, int32_t slot) {
  if (!p.dedup) return true;
  const int64_t base = static_cast<int64_t>(token) * p.topk;
  const int32_t destination = p.rank_of_expert[p.expert_of_slot[base + slot]];
  for (int32_t other = 0; other < p.topk; ++other) {
    const int32_t expert = p.expert_of_slot[base + other];
    if (expert >= 0 && p.rank_of_expert[expert] == destination &&
        p.row_of_slot[base + other] < p.row_of_slot[base + slot]) {
      return false;
    }
  }
  return true;
}

}  // namespace uniep::program
