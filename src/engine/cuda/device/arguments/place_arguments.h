#pragma once

#include "engine/cuda/device/arguments/placement_tables.h"
#include "engine/cuda/device/arguments/rank_call.h"
#include "model/routing_check.h"
#include "model/token_order.h"

// Arguments and memory of the kernels that place.
namespace uniep::cuda {

constexpr int kPlaceThreads = 512;
constexpr int kPlaceWarps = kPlaceThreads / 32;

// What a placement does in one launch. kCount ends when every rank knows all counts; kAssign needs them.
constexpr uint32_t kCountPhase = 1;
constexpr uint32_t kAssignPhase = 2;

enum class PlaceFault : int32_t {
  kNone = 0,
  kRouting,         // a slot is not legal
  kOverflow,        // a rank gets more rows than it has memory for
  kOtherArguments,  // a peer places another layer, or within another capacity
  kCountsMissing,   // a peer's counts did not come in time
  kRowsMissing,     // a peer's rows did not come in time
  kStalled,         // not all CTAs of the rank ran
  kPeerFailed,      // a peer's host gave up the call, or left the group
  kPeerGaveUp,      // a peer's placement failed
};

// What must be the same on all ranks of a placement.
struct PlaceTerms {
  int32_t experts, topk;
  int64_t row_limit;  // padded rows that a rank has memory for
  int64_t tokens;     // that a rank may have; 0: any number, all ranks know them
};
UNIEP_HOST_DEVICE bool is_same(const PlaceTerms& a, const PlaceTerms& b) {
  return a.experts == b.experts && a.topk == b.topk && a.row_limit == b.row_limit && a.tokens == b.tokens;
}

// The first failure of a rank's placements; stays until the host has read it. With a routing that is not legal or does
// not fit a placement is empty on every rank: all of its slots count as unused, so that what is launched behind it does
// no harm. With any other fault it has failed, and calls on it end in an error on all ranks.
struct PlaceReport {
  PlaceFault fault;
  RoutingFault routing_fault;
  int32_t experts, topk;  // of the layer
  int32_t rank;           // whose routing or rows, or the peer that was waited for
  int32_t expert;
  int64_t entry;  // token * K + slot
  int64_t id;
  float prob;
  int32_t expert_rows;
  int64_t rows, limit;
  PlaceTerms terms, peers_terms;  // kOtherArguments
  int32_t dense, unused;          // kRouting: of the rank's routing
};

// What a source tells of itself beside its counts.
struct SourceHeader {
  int64_t tokens;
  uint64_t problem;  // see problem_word(); 0: none
  int64_t id;        // of the slot with the problem
  float prob;
  int32_t dense;  // the slots are those of a map
  PlaceTerms terms;
};

// A word that atomicMax() keeps for the first slot with a problem.
UNIEP_HOST_DEVICE uint64_t problem_word(int64_t entry, RoutingFault fault) {
  return ~(static_cast<uint64_t>(entry) * 4 + static_cast<uint64_t>(fault));
}
UNIEP_HOST_DEVICE int64_t problem_entry(uint64_t word) {
  return static_cast<int64_t>(~word / 4);
}
UNIEP_HOST_DEVICE RoutingFault problem_fault(uint64_t word) {
  return static_cast<RoutingFault>(~word % 4);
}

// A rank's memory that peers write; element p only by rank p. `counted` holds the number of the placement, `placed`
// placed_word(). Counts have two banks: a peer can be one placement ahead of me, and not two, since it waits for my
// counts in between.
struct PlaceExchange {
  uint32_t counted[kMaxCudaRanks];
  uint32_t placed[kMaxCudaRanks];
  SourceHeader header[2][kMaxCudaRanks];
  int32_t counts[2][kMaxCudaRanks][kMaxPlaceExperts];
};

UNIEP_HOST_DEVICE uint32_t placed_word(uint32_t epoch, bool gave_up) {
  return epoch * 2 + (gave_up ? 1 : 0);
}

// What the ranks of a group reach of each other as long as it lives.
struct GroupControl {
  CallBoard board;
  PlaceExchange place;
};

// A rank's memory of its own, kept from placement to placement. Zero at first.
struct PlaceState {
  uint32_t epoch;         // number of the running or last placement
  uint32_t counted_ctas;  // CTAs that have counted, over all placements
  uint32_t placed_ctas;   // of this placement
  uint32_t gave_up;       // number of the last placement that a CTA of the rank gave up
  uint64_t problem[2];
  PlaceReport report;
};

struct PlaceRank {
  const void* topk_ids;
  const float* probs;
  int32_t rank, tokens, wide_ids, dense;
  PlacementTables tables;
  PlaceState* state;
  int32_t* chunk_counts;                 // [CTAs, E] slots by expert
  int32_t* chunk_tokens;                 // [CTAs, kTokenClasses] tokens by class
  const uint32_t* call_failed;           // of the rank's WaitReport, or null
  GroupControl* control[kMaxCudaRanks];  // of every rank, as this one reaches it
  RowSource* rows_of[kMaxCudaRanks];     // where every rank takes rows; own tables.rows, or memory to copy from
};

// Ranks that share a launch are neighbours: CTA b works for rank[b / ctas].
struct PlaceArguments {
  int32_t ranks;
  int32_t ctas;  // a rank
  uint32_t phases;
  uint32_t call;  // its number on this rank; kReplayed in a graph
  PlaceTerms terms;
  uint64_t wait_limit_ns, arrival_limit_ns;
  PlaceRank rank[kMaxCudaRanks];
};
static_assert(sizeof(PlaceArguments) < 4096, "passed as a kernel's argument");

struct RowOfSourceArguments {
  int32_t ranks, experts, topk, unused;
  int32_t rank[kMaxCudaRanks];
  PlacementTables tables[kMaxCudaRanks];
};

// One CTA a rank: fills `tables`, to which calls[i].program points, and what else of it follows from the counts.
struct ProgramTablesArguments {
  RankCall* calls;
  ProgramTables tables[kMaxCudaRanks];
};

UNIEP_HOST_DEVICE constexpr int place_shared_bytes(int64_t experts) {
  return (static_cast<int>((kPlaceWarps + 4) * experts) + 1 + (kPlaceWarps + 1) * kTokenClasses) * 4;
}
static_assert(place_shared_bytes(kMaxPlaceExperts) <= 227 * 1024, "shared memory of a CTA");

}  // namespace uniep::cuda
