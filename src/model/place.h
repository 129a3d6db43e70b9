#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "model/placement_state.h"
#include "uniep/layer.h"

namespace uniep {

// Padded rows of a rank that the tables of rows, which are int32, can count.
inline constexpr int64_t kMaxPlacedRows = std::numeric_limits<int32_t>::max() - kRowAlignment;

// Checks the routings of all ranks and places them (host memory). Throws Error that names rank, token, slot and value.
std::shared_ptr<internal::PlacementState> place_on_host(const LayerShape& shape, int ranks,
                                                        std::span<const Routing> routings, Capacity capacity);

// Its two halves where the slots are counted elsewhere: checks what the host sees of the `local` ranks' routings and
// leaves the counts at zero; then, with the counts in place, lays out rows and throws Error(kOverflow) where they do
// not fit.
using internal::RankSpan;
std::shared_ptr<internal::PlacementState> begin_placement(const LayerShape& shape, int ranks, RankSpan local,
                                                          std::span<const Routing> routings, Capacity capacity);
void lay_out_counts(internal::PlacementState& state);

// Throws Error(kInvalidArgument) when all ranks have more slots than rows can be counted.
void require_slots(int64_t slots);

// Throws Error(kInvalidArgument) when a rank's routing lacks an array or has too many slots.
void check_routing(const Routing& routing, int rank, const LayerShape& shape);

// Throws Error(kInvalidArgument) when a layer of this shape can not be spread over so many ranks.
void check_shape(const LayerShape& shape, int ranks);

}  // namespace uniep
