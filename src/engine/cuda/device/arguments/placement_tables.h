#pragma once

#include "model/row_table.h"

// One rank's placement in device memory: the tables that RankProgram points to.
namespace uniep::cuda {

constexpr int kMostPlaceExperts = 2048;  // the placement kernel keeps twenty numbers an expert in shared memory

// From the routing alone.
struct PlacementTables {
  int32_t* rank_of_expert;     // [E]
  int32_t* counts;             // [W, E]
  int32_t* source_offset;      // [W, E]
  int32_t* expert_rows;        // [E]
  int32_t* segment_start;      // [E]
  int32_t* tokens_of_rank;     // [W]
  int32_t* token_block_begin;  // [W + 1]
  int64_t* source_begin;       // [W + 1]
  int32_t* expert_of_slot;     // [T, K]
  int32_t* row_of_slot;        // [T, K]
  int32_t* token_order;        // [T]
  RowSource* rows;             // [padded rows]
  int32_t* row_of_source;      // [sum of T, K]; read under deduplication and combine groups only
  uint32_t* whole;             // 0 once the placement has failed on this rank: then no table means anything
};

// From the placement and a Schedule.
struct ProgramTables {
  int32_t* block_begin;     // [El + 1]
  int32_t* odd_blocks;      // [El + 1]
  int32_t* rotation;        // [El]
  int32_t* expert_block;    // [E]
  int32_t* blocks_of_rank;  // [W]
  int32_t* push_begin;      // [El W + 1]
  int32_t* push_block;      // [El W]
};

}  // namespace uniep::cuda
