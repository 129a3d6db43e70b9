#pragma once

#include "engine/cuda/device/place/sums.h"

// The order of the sums (model/token_order.h): like rows, tokens get their places by prefix sums over warps and CTAs.
namespace uniep::cuda {

// Classes are the lanes of a warp where they are summed.
static_assert(kTokenClasses == 32, "a class for each lane");

// A warp. Calls visit(token, class, mask of the line's lanes with this class) in each lane that has a token, line by
// line.
template <typename Id, typename Visit>
UNIEP_DEVICE void for_each_token_of_warp(const PlaceCta& cta, const Id* ids, Visit&& visit) {
  const WarpRange mine = range_of_warp(cta, static_cast<uint32_t>(cta.own.tokens));
  for (uint32_t base = mine.begin; base < mine.end; base += 32) {
    const uint32_t token = base + ptx::lane_index();
    int32_t class_of_token = -1;
    if (token < mine.end) {
      class_of_token = token_class(ids + static_cast<int64_t>(token) * cta.args.terms.topk, cta.args.terms.topk,
                                   cta.args.terms.experts, cta.local_experts());
    }
    const uint32_t same = __match_any_sync(0xffffffffu, class_of_token);
    if (token < mine.end) visit(static_cast<int32_t>(token), class_of_token, same);
    __syncwarp();
  }
}

// A warp.
template <typename Id>
UNIEP_DEVICE void count_tokens(const PlaceCta& cta, const Id* ids) {
  int32_t* const tokens = cta.warp_tokens();
  for_each_token_of_warp(cta, ids, [&](int32_t, int32_t class_of_token, uint32_t same) {
    if ((same & ptx::lanes_before()) == 0) tokens[class_of_token] += __popc(same);
  });
}

// One warp: turns the warps' counts into what comes before each warp, and leaves the CTA's counts for the others.
UNIEP_DEVICE void sum_warp_tokens(const PlaceCta& cta) {
  const int32_t class_of_lane = static_cast<int32_t>(ptx::lane_index());
  const int32_t count = sum_over_warps(cta.shared.warp_tokens, kTokenClasses, class_of_lane);
  if ((cta.args.phases & kCountPhase) != 0) cta.own.chunk_tokens[cta.index * kTokenClasses + class_of_lane] = count;
}

// One warp, once all CTAs have counted.
UNIEP_DEVICE void sum_cta_tokens(const PlaceCta& cta) {
  const int32_t class_of_lane = static_cast<int32_t>(ptx::lane_index());
  const CtaSums tokens =
      sum_over_ctas(cta, [&](int32_t other) { return cta.own.chunk_tokens[other * kTokenClasses + class_of_lane]; });
  int32_t up_to = tokens.all;
#pragma unroll
  for (int32_t step = 1; step < kTokenClasses; step *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, up_to, static_cast<uint32_t>(step));
    if (class_of_lane >= step) up_to += other;
  }
  cta.shared.first_token[class_of_lane] = up_to - tokens.all + tokens.before;
}

// A warp.
UNIEP_DEVICE void order_tokens(const PlaceCta& cta) {
  const PlacementTables& tables = cta.own.tables;
  int32_t* const before = cta.warp_tokens();
  for_each_token_of_warp(cta, tables.expert_of_slot, [&](int32_t token, int32_t class_of_token, uint32_t same) {
    const int32_t earlier = __popc(same & ptx::lanes_before());
    tables.token_order[cta.shared.first_token[class_of_token] + before[class_of_token] + earlier] = token;
    __syncwarp(same);
    if (earlier == 0) before[class_of_token] += __popc(same);
  });
}

// A warp: the order of an empty placement.
UNIEP_DEVICE void order_ascending(const PlaceCta& cta) {
  const WarpRange mine = range_of_warp(cta, static_cast<uint32_t>(cta.own.tokens));
  for (uint32_t token = mine.begin + ptx::lane_index(); token < mine.end; token += 32) {
    cta.own.tables.token_order[token] = static_cast<int32_t>(token);
  }
}

}  // namespace uniep::cuda
