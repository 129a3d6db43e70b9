#pragma once

#include "engine/carver.h"
#include "engine/engine.h"
#include "model/activation_choice.h"
#include "model/bias_sums.h"
#include "model/placement_state.h"
#include "program/rank_program.h"
#include "uniep/layer.h"

// How a rank's blocks of memory are divided: what forward saves, what a call works in, and what backward leaves for
// weight gradients that come later. One function computes sizes (with no memory) and pointers, so they can not
// disagree.
namespace uniep::internal {

struct MemoryRequest {
  LayerShape shape;
  int64_t z_columns = 0;   // 2 I, or I
  int64_t prob_terms = 0;  // of a row's dprob
  int64_t rows = 0;        // with padding
  bool staged = false;     // combine rows are kept locally before they are sent
  bool keep_xg = true, keep_z = true;
  MemoryOptions use;

  // Backward: FC1 or its weight gradient reads rows of x that are not kept.
  bool redispatches_x() const { return !keep_xg && (!keep_z || use.weight_gradients != WeightGradientTime::kNone); }
  // Backward: z becomes dz in the saved block.
  bool has_dz_in_saved() const { return keep_z && use.last_use; }
  bool later() const { return use.weight_gradients == WeightGradientTime::kLater; }
};

// Rows that a token takes on its way into the ordered sum.
inline int64_t slots_per_token(const LayerShape& shape, const Numerics& numerics) {
  return numerics.combine_groups > 0 ? numerics.combine_groups : shape.topk;
}

// Whether p multiplies b2.
inline bool weighs_bias(const Numerics& numerics) {
  return numerics.bias && numerics.router_weight == RouterWeight::kOutput;
}

// Terms of a row's dprob.
inline int64_t prob_terms(const LayerShape& shape, const Numerics& numerics) {
  const int64_t of_bias = weighs_bias(numerics) ? divide_up(shape.hidden, kBiasDotColumns) : 0;
  return divide_up(shape.intermediate, kProbColumns) + of_bias;
}

inline MemoryRequest memory_request(const LayerConfig& config, const Schedule& schedule,
                                    const PlacementState& placement, int rank, const MemoryOptions& use = {}) {
  const int64_t rows = placement.capacity > 0 ? placement.capacity : placement.padded_rows[rank];
  const LayerShape& shape = config.shape;
  return {shape,
          z_columns(shape, config.numerics),
          prob_terms(shape, config.numerics),
          rows,
          schedule.combine.transport == CombineTransport::kStaged,
          schedule.save_xg == SaveXg::kKeep,
          schedule.save_z == SaveZ::kKeep,
          use};
}

struct SavedPieces {
  BFloat16* z = nullptr;  // null where it is not kept
  BFloat16* xg = nullptr;
};

inline SavedPieces carve_saved(Carver& carver, const MemoryRequest& request) {
  SavedPieces pieces;
  if (request.keep_z) pieces.z = carver.take<BFloat16>(request.rows * request.z_columns);
  if (request.keep_xg) pieces.xg = carver.take<BFloat16>(request.rows * request.shape.hidden);
  return pieces;
}

// Where nothing is kept, the first pieces of the workspace.
inline SavedPieces carve_saved(Carver& saved, Carver& workspace, const MemoryRequest& request) {
  return carve_saved(request.use.keep_saved ? saved : workspace, request);
}

struct WorkspacePieces {
  BFloat16* gathered[kMaxOperands] = {};  // what the saved block does not hold
  BFloat16* z = nullptr;                  // of backward, wherever it lies; of forward, unless the saved block holds it
  BFloat16* activation = nullptr;
  BFloat16* dz = nullptr;
  float* prob_chunks = nullptr;
  BFloat16* output_rows = nullptr;
  uint32_t* failed = nullptr;  // whether the backward failed, for weight gradients that come later
};

// What the weight gradients read of a backward, but for what lies in the saved block: xg where it was kept, and dz in
// the place of a kept z in a last use.
inline void carve_operands(Carver& carver, const MemoryRequest& request, WorkspacePieces& pieces) {
  const int64_t rows = request.rows, hidden = request.shape.hidden, intermediate = request.shape.intermediate;
  pieces.gathered[0] = carver.take<BFloat16>(rows * hidden);
  if (request.redispatches_x()) pieces.gathered[1] = carver.take<BFloat16>(rows * hidden);
  pieces.activation = carver.take<BFloat16>(rows * intermediate);
  if (!request.has_dz_in_saved()) pieces.dz = carver.take<BFloat16>(rows * request.z_columns);
}

// In backward with `pending` for what outlives the call, where the weight gradients come later.
inline WorkspacePieces carve_workspace(Carver& carver, Carver& pending, const MemoryRequest& request,
                                       Direction direction) {
  const int64_t rows = request.rows, hidden = request.shape.hidden, intermediate = request.shape.intermediate;
  WorkspacePieces pieces;
  if (direction == Direction::kBackward) {
    carve_operands(request.later() ? pending : carver, request, pieces);
    if (request.later()) pieces.failed = pending.take<uint32_t>(1);
    pieces.prob_chunks = carver.take<float>(rows * request.prob_terms);
  } else {
    if (!request.keep_xg) pieces.gathered[0] = carver.take<BFloat16>(rows * hidden);
    if (!request.keep_z) pieces.z = carver.take<BFloat16>(rows * request.z_columns);
    pieces.activation = carver.take<BFloat16>(rows * intermediate);
  }
  if (request.staged) pieces.output_rows = carver.take<BFloat16>(rows * hidden);
  return pieces;
}

inline WorkspacePieces carve_forward_workspace(Carver& carver, const MemoryRequest& request) {
  Carver none(nullptr);
  return carve_workspace(carver, none, request, Direction::kForward);
}

// A backward's pieces; those that lie in the saved block included.
inline WorkspacePieces carve_backward(Carver& workspace, Carver& pending, const MemoryRequest& request,
                                      const SavedRank& saved) {
  WorkspacePieces pieces = carve_workspace(workspace, pending, request, Direction::kBackward);
  if (request.keep_xg) pieces.gathered[1] = saved.xg;
  if (request.has_dz_in_saved()) pieces.dz = saved.z;
  pieces.z = request.keep_z ? saved.z : pieces.dz;  // recomputed, it becomes dz in place
  return pieces;
}

// The sizes of a rank's blocks in a call.
inline MemoryNeed block_sizes(const MemoryRequest& request, Direction direction) {
  MemoryNeed need;
  Carver saved(nullptr), workspace(nullptr), pending(nullptr);
  if (direction == Direction::kForward) carve_saved(saved, workspace, request);
  carve_workspace(workspace, pending, request, direction);
  need.saved_bytes = saved.used();
  need.workspace_bytes = workspace.used();
  need.pending_bytes = pending.used();
  return need;
}

}  // namespace uniep::internal
