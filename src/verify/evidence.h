#pragma once

#include <vector>

#include "verify/inputs.h"
#include "verify/sums.h"

// Runs that disagree, and whom that speaks against.
namespace uniep::verify {

// One tile in which one run stands against two that agree.
struct Evidence {
  Place place;
  int run = 0;                  // the wrong one
  uint64_t wrong = 0;           // its checksum
  std::vector<int> candidates;  // ranks, one of which made the tile wrong
  int64_t expert = -1;          // whose work it is; -1: the sum's, or not known
};

struct Disagreement {
  std::vector<Evidence> evidence;   // in the order of tensors
  std::vector<Place> no_majority;   // tiles in which no two runs agree
  std::vector<Evidence> ambiguous;  // two ranks: home says one thing twice, the other rank another one once
  int64_t tiles = 0;                // in which any runs differ
};

// Of three runs, the first of which is the job's own.
Disagreement compare(const Inputs& inputs, const std::vector<HostRouting>& routings, const std::vector<Sums>& runs);

// The ranks that explain all of the evidence; empty where no single rank does.
std::vector<int> common_candidates(const std::vector<Evidence>& evidence);

}  // namespace uniep::verify
