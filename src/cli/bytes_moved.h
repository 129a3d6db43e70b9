#pragma once

#include <cstdint>
#include <vector>

#include "uniep/uniep.h"

namespace uniep::cli {

// Bytes between ranks, [source][destination]; the diagonal is what stays local.
using ByteMatrix = std::vector<std::vector<int64_t>>;

// The bf16 rows of one forward pass; backward moves as many (dy there, dx back).
struct BytesMoved {
  ByteMatrix dispatch;  // token's rank to expert's rank: a row a slot, or with deduplication one a (token, rank)
  ByteMatrix combine;   // expert's rank to token's rank: a row a slot, or one a (token, expert group)
};
BytesMoved bytes_moved(const Placement& placement, const Schedule& schedule, const Numerics& numerics);

}  // namespace uniep::cli
