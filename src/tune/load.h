#pragma once

#include <vector>

#include "model/placement_state.h"
#include "sim/machine.h"

// What a routing asks of one rank, in numbers that a closed form can work with.
namespace uniep::tune {

// Rows that come and go over one level of links.
struct LevelRows {
  double dispatched = 0;           // rows in, one a slot
  double dispatched_once = 0;      // rows in, one a token and rank, or a token and node where a relay hands them on
  double returned = 0;             // results out to their tokens' ranks
  double sent = 0, sent_once = 0;  // rows of this rank's tokens that go out
  double received = 0;             // results that come back for them
  bool operator==(const LevelRows&) const = default;
};

inline constexpr int kBlockRows = 128;  // of one expert, that a tile has

// A result is a row, or with combine groups the sum of a token's rows in a group of experts.
struct RankLoad {
  double tokens = 0;
  double rows = 0;       // that its experts get
  double blocks = 0;     // of 128 rows of one expert
  double rows_once = 0;  // with deduplication: those that are taken, the others are put beside
  double results = 0;    // that its experts' rows are sent back as, to itself too
  double summands = 0;   // results that its own tokens are the sums of
  double local_experts = 0;
  double active_experts = 0;      // those that get rows
  std::vector<LevelRows> levels;  // as the machine's links
  bool operator==(const RankLoad&) const = default;
};

// Every slot of a token goes to another expert, all equally likely, and every rank has so many tokens: the mean. One
// rank stands for all.
RankLoad uniform_load(const LayerShape& shape, int ranks, double tokens, const sim::MachineDescription& machine,
                      int64_t combine_groups = 0);

// A rank of a placement.
RankLoad load_of(const internal::PlacementState& placement, int rank, const sim::MachineDescription& machine,
                 int64_t combine_groups = 0);

}  // namespace uniep::tune
