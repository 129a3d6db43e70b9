#pragma once

#include <memory>
#include <vector>

#include "model/row_table.h"
#include "uniep/layer.h"

// Where every (token, slot) pair lands. Rows are grouped by expert on the expert's rank; inside an expert they stand in
// the order (source rank, token, slot), which is the order of the global batch whatever the number of ranks.
namespace uniep::internal {

// What a rank knows of the placement beyond the counts.
struct RankPlacement {
  int64_t tokens = 0;
  bool dense = false;                   // of a local rank: it gave a map, and gets dprobs [T, E]
  std::vector<int32_t> expert_of_slot;  // [T, K] global expert, -1 = unused
  std::vector<int32_t> row_of_slot;     // [T, K] row on the expert's rank, -1 = unused
  std::vector<int32_t> token_order;     // [T] the tokens in the order of their sums (token_order.h)
  std::vector<RowSource> rows;          // [padded rows]
};

// Ranks that follow each other.
struct RankSpan {
  int first = 0;
  int count = 0;
  bool contains(int rank) const { return rank >= first && rank < first + count; }
};

struct PlacementState;

// What an engine keeps with a placement; it goes with it.
class EngineTables {
 public:
  virtual ~EngineTables() = default;
  // The placement with the counts and tokens that are on the devices; waits for them.
  virtual PlacementState with_counts(const PlacementState& placed) const = 0;
};

struct PlacementState {
  LayerShape shape;
  int ranks = 1;
  RankSpan placed_by;                   // the process's ranks, whose tables there are
  RankSpan local;                       // of those the host knows what they are given; by need of all
  std::vector<int32_t> expert_begin;    // [W + 1] first global expert of a rank
  std::vector<int32_t> rank_of_expert;  // [E]
  std::vector<int32_t> counts;          // [W, E] rows that a source sends to an expert
  std::vector<int32_t> source_offset;   // [W, E] where they begin inside the expert's segment
  std::vector<int32_t> expert_rows;     // [E]
  std::vector<int32_t> segment_start;   // [E] first row of the segment on its rank
  std::vector<int64_t> rows;            // [W] without padding
  std::vector<int64_t> padded_rows;     // [W] with padding
  int64_t capacity = 0;                 // rows that memory is taken for whatever the routing; 0: by need
  bool counts_on_devices = false;       // made there within the capacity: the numbers above are zero here
  std::vector<RankPlacement> rank;      // [W]; with counts on the devices, others' tokens are the most they may have
  std::shared_ptr<EngineTables> engine_tables;
};

}  // namespace uniep::internal
