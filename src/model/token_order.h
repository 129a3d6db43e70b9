#pragma once

#include "model/portability.h"

// The order in which a rank sums its tokens. Ranks do their experts in ascending order, so a token is complete once the
// last of its experts is: tokens whose last expert comes early are summed first, while others still multiply. The order
// changes no sum.
namespace uniep {

// Tokens are told apart by which 32nd of its rank's experts their last expert lies in.
inline constexpr int32_t kTokenClasses = 32;

// `topk_ids` are the token's; those that are no expert do not count.
template <typename Id>
UNIEP_HOST_DEVICE int32_t token_class(const Id* topk_ids, int32_t topk, int32_t experts, int32_t local_experts) {
  int32_t last = 0;
  for (int32_t slot = 0; slot < topk; ++slot) {
    const int64_t id = static_cast<int64_t>(topk_ids[slot]);
    if (id < 0 || id >= experts) continue;
    const int32_t local = static_cast<int32_t>(id) % local_experts;
    last = local > last ? local : last;
  }
  return static_cast<int32_t>(int64_t{kTokenClasses} * last / local_experts);
}

}  // namespace uniep
