#pragma once

#include "program/task_work.h"

namespace uniep::cli {

// The bf16 rows of one forward pass, [source][destination], the diagonal being what stays local; backward moves as many
// (dy there, dx back).
struct BytesMoved {
  ByteMatrix dispatch;  // token's rank to expert's rank: a row a slot, or with deduplication one a (token, rank)
  ByteMatrix combine;   // expert's rank to token's rank: a row a slot, or one a (token, expert group)
};
// The placement's rows are on the host.
BytesMoved bytes_moved(const Placement& placement, const Schedule& schedule, const Numerics& numerics);

}  // namespace uniep::cli
