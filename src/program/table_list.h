#pragma once

#include "program/namespace.h"

// The tables that a RankProgram points to, listed here alone: TABLE(type, name, entries). `entries` is in terms of `s`,
// a TableSizes. Who fills them: model/placement.cpp and program/build.cpp on the host, place.cu and program_tables.cu
// on the device.

// Of all experts; from the routing, as those of UNIEP_RANK_TABLES and UNIEP_SLOT_TABLES.
#define UNIEP_EXPERT_TABLES(TABLE)                       \
  TABLE(int32_t, rank_of_expert, s.experts)              \
  TABLE(int32_t, counts, s.counts())        /* [W, E] */ \
  TABLE(int32_t, source_offset, s.counts()) /* [W, E] */ \
  TABLE(int32_t, expert_rows, s.experts)                 \
  TABLE(int32_t, segment_start, s.experts)

// From the placement and a Schedule.
#define UNIEP_SCHEDULE_TABLES(TABLE)                                                                   \
  TABLE(int32_t, block_begin, s.local_experts + 1) /* first row block of a local expert */             \
  TABLE(int32_t, rotation, s.local_experts)        /* of a local expert: the block that comes first */ \
  TABLE(int32_t, expert_block, s.experts)          /* first row block of an expert on its own rank */  \
  TABLE(int32_t, blocks_of_rank, s.ranks)                                                              \
  TABLE(int32_t, local_of_turn, s.experts) /* [W, turn] see expert_of_turn() */                        \
  TABLE(int32_t, turn_of_local, s.local_experts)                                                       \
  TABLE(int32_t, blocks_before, s.local_experts + 1) /* row blocks of experts of earlier turns */      \
  TABLE(int32_t, odd_blocks, s.local_experts + 1)    /* those with an odd number of row blocks */      \
  TABLE(int32_t, spans_before, s.local_experts + 1)  /* of experts of earlier turns, see Span */       \
  TABLE(int32_t, push_begin, s.runs() + 1)           /* first push tile by (expert's turn, rank's) */  \
  TABLE(int32_t, push_block, s.runs())               /* first block of that run */

// Of all ranks.
#define UNIEP_RANK_TABLES(TABLE)                                                 \
  TABLE(int32_t, token_block_begin, s.ranks + 1) /* token blocks of all ranks */ \
  TABLE(int32_t, tokens_of_rank, s.ranks)

// Of this rank's tokens, and of the rows of its experts.
#define UNIEP_SLOT_TABLES(TABLE)                                     \
  TABLE(int32_t, expert_of_slot, s.slots()) /* [T, K] */             \
  TABLE(int32_t, row_of_slot, s.slots())    /* [T, K] */             \
  TABLE(int32_t, token_order, s.tokens)     /* see summed_token() */ \
  TABLE(RowSource, rows, s.rows)

// Of the slots of all ranks, on a device alone: see row_here().
#define UNIEP_SOURCE_TABLES(TABLE)                                 \
  TABLE(int64_t, source_begin, s.ranks + 1) /* in row_of_source */ \
  TABLE(int32_t, row_of_source, s.sources)  /* [source_begin[s] + t K + k] */

// What a placement on a device makes, whatever the Schedule.
#define UNIEP_PLACEMENT_TABLES(TABLE) \
  UNIEP_EXPERT_TABLES(TABLE)          \
  UNIEP_RANK_TABLES(TABLE)            \
  UNIEP_SLOT_TABLES(TABLE)            \
  UNIEP_SOURCE_TABLES(TABLE)

namespace uniep::program {

struct TableSizes {
  int64_t experts = 0, ranks = 0, local_experts = 0;
  int64_t tokens = 0, topk = 0;  // of this rank
  int64_t rows = 0;              // of this rank's experts, with padding
  int64_t sources = 0;           // slots of all ranks
  int64_t counts() const { return ranks * experts; }
  int64_t slots() const { return tokens * topk; }
  int64_t runs() const { return ranks * local_experts; }
};

}  // namespace uniep::program
