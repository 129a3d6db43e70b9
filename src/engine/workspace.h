#pragma once

#include "engine/carver.h"
#include "model/placement_state.h"
#include "program/rank_program.h"
#include "uniep/layer.h"

// How a rank's two blocks of memory are divided: what forward saves, and what a call works in. One function computes
// sizes (with no memory) and pointers, so they can not disagree.
namespace uniep::internal {

struct MemoryRequest {
  LayerShape shape;
  int64_t rows = 0;     // with padding
  bool staged = false;  // combine rows are kept locally before they are sent
  bool keep_xg = true;
};

inline MemoryRequest memory_request(const LayerShape& shape, const Schedule& schedule, const PlacementState& placement,
                                    int rank) {
  const int64_t rows = placement.capacity > 0 ? placement.capacity : placement.padded_rows[rank];
  return {shape, rows, schedule.combine.transport == CombineTransport::kStaged, schedule.save_xg == SaveXg::kKeep};
}

// Rows that a token takes on its way into the ordered sum.
inline int64_t slots_per_token(const LayerShape& shape, const Numerics& numerics) {
  return numerics.combine_groups > 0 ? numerics.combine_groups : shape.topk;
}

struct SavedPieces {
  BFloat16* z = nullptr;
  BFloat16* xg = nullptr;
};

inline SavedPieces carve_saved(Carver& carver, const MemoryRequest& request) {
  SavedPieces pieces;
  pieces.z = carver.take<BFloat16>(request.rows * 2 * request.shape.intermediate);
  if (request.keep_xg) pieces.xg = carver.take<BFloat16>(request.rows * request.shape.hidden);
  return pieces;
}

struct WorkspacePieces {
  BFloat16* gathered[kMaxOperands] = {};  // what the saved block does not hold
  BFloat16* activation = nullptr;
  BFloat16* dz = nullptr;
  float* prob_chunks = nullptr;
  BFloat16* output_rows = nullptr;
};

inline WorkspacePieces carve_workspace(Carver& carver, const MemoryRequest& request, Direction direction) {
  const bool backward = direction == Direction::kBackward;
  const int64_t rows = request.rows, hidden = request.shape.hidden, intermediate = request.shape.intermediate;
  WorkspacePieces pieces;
  if (backward || !request.keep_xg) pieces.gathered[0] = carver.take<BFloat16>(rows * hidden);
  if (backward && !request.keep_xg) pieces.gathered[1] = carver.take<BFloat16>(rows * hidden);
  pieces.activation = carver.take<BFloat16>(rows * intermediate);
  if (backward) {
    pieces.dz = carver.take<BFloat16>(rows * 2 * intermediate);
    pieces.prob_chunks = carver.take<float>(rows * divide_up(intermediate, 64));
  }
  if (request.staged) pieces.output_rows = carver.take<BFloat16>(rows * hidden);
  return pieces;
}

// The sizes of a rank's two blocks in a call.
inline MemoryNeed block_sizes(const MemoryRequest& request, Direction direction) {
  MemoryNeed need;
  Carver saved(nullptr), workspace(nullptr);
  if (direction == Direction::kForward) carve_saved(saved, request);
  carve_workspace(workspace, request, direction);
  need.saved_bytes = saved.used();
  need.workspace_bytes = workspace.used();
  return need;
}

}  // namespace uniep::internal
