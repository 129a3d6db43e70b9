#pragma once

#include "model/portability.h"

namespace uniep {

// Every expert's segment starts at a multiple of this many rows and is padded to it.
inline constexpr int kRowAlignment = 128;

UNIEP_HOST_DEVICE int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
UNIEP_HOST_DEVICE int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// An entry of a rank's row table: which slot a row belongs to. Padding has rank = -1.
struct RowSource {
  int32_t rank;
  int32_t token;
  int32_t slot;
  float prob;
};
static_assert(sizeof(RowSource) == 16, "a row table entry is one 16-byte store to a peer");

}  // namespace uniep
