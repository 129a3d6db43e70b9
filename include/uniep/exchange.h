#pragma once

#include <span>

#include "uniep/layer.h"

// Dispatch and combine alone, for those who bring their own GEMM: rows to their experts and back, on a Placement. Both
// are collective calls like forward(): queued on the ranks' streams, in one order with all other calls of the Group.
// Spans hold one entry per local rank. A Schedule says how the rows travel (dispatch.*, comm.*, order.source_rotation,
// order.experts, queue, combine.column_chunks); on the cuda engine comm.dispatch_sms and comm.combine_sms are the SMs
// that a call takes, 0 meaning all but comm.reserve_sms. resolve() for Operation::kDispatch or kCombine fills in what
// is fastest alone; a layer's Schedule is legal, too, where its rings fit the exchange's warps. No value changes a bit
// of the result. padded_rows is Placement::padded_rows, or the capacity where the placement has one; rows beyond the
// segments are neither read nor written.
namespace uniep {

struct DispatchArguments {
  const BFloat16* x = nullptr;  // [T, H], or dy
  BFloat16* rows = nullptr;     // [padded_rows, H] written: every row's copy of its token, padding as zero
  float* row_probs = nullptr;   // [padded_rows] or null: each row's prob, 0 for padding
  Stream stream{};
};

// Throws as forward() does.
UNIEP_API void dispatch(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
                        std::span<const DispatchArguments> arguments);

struct CombineArguments {
  const BFloat16* rows = nullptr;  // [padded_rows, H]
  BFloat16* y = nullptr;           // [T, H] written: the sum of a token's rows, as Numerics::combine_groups says
  // [padded_rows], or null on all ranks; by need a rank without tokens and rows may give neither this nor dprobs.
  const float* row_dprobs = nullptr;
  float* dprobs = nullptr;  // [T, K] written with row_dprobs: each slot's, +0 for an unused one; or [T, E] (Routing)
  Stream stream{};
};

UNIEP_API void combine(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
                       std::span<const CombineArguments> arguments);

}  // namespace uniep
