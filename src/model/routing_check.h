#pragma once

#include "model/portability.h"

// What makes a routing legal, for both engines.
namespace uniep {

// What is wrong with one slot, or kNone. In the order in which a slot is checked.
enum class RoutingFault : int32_t { kNone, kIdOutOfRange, kProbNotFinite, kExpertTwice };

// The fault of slot `entry` = token * topk + slot, given that the token's earlier slots have none.
template <typename Id>
UNIEP_HOST_DEVICE RoutingFault check_slot(const Id* topk_ids, float prob, int64_t entry, int32_t slot,
                                          int64_t experts) {
  const int64_t id = static_cast<int64_t>(topk_ids[entry]);
  if (id == -1) return RoutingFault::kNone;
  if (id < 0 || id >= experts) return RoutingFault::kIdOutOfRange;
  // NOLINTNEXTLINE(misc-redundant-expression): not 0 for what is not finite
  if (!(prob - prob == 0.0f)) return RoutingFault::kProbNotFinite;
  for (int32_t back = 1; back <= slot; ++back) {
    if (static_cast<int64_t>(topk_ids[entry - back]) == id) return RoutingFault::kExpertTwice;
  }
  return RoutingFault::kNone;
}

}  // namespace uniep
