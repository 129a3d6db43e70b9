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
  double returned = 0;             // rows out to their tokens' ranks
  double sent = 0, sent_once = 0;  // rows of this rank's tokens that go out; beside them results come back, as `sent`
  bool operator==(const LevelRows&) const = default;
};

struct RankLoad {
  double tokens = 0;
  double rows = 0;        // that its experts get
  double blocks = 0;      // of 128 rows of one expert
  double rows_once = 0;   // with deduplication: those that are taken, the others are put beside
  double used_slots = 0;  // of its own tokens
  double local_experts = 0;
  double active_experts = 0;      // those that get rows
  std::vector<LevelRows> levels;  // as the machine's links
  bool operator==(const RankLoad&) const = default;
};

// Every slot of a token goes to another expert, all equally likely, and every rank has so many tokens: the mean. One
// rank stands for all.
RankLoad uniform_load(const LayerShape& shape, int ranks, double tokens, const sim::MachineDescription& machine);

// A rank of a placement.
RankLoad load_of(const internal::PlacementState& placement, int rank, const sim::MachineDescription& machine);

}  // namespace uniep::tune
