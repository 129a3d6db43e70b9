#pragma once

#include "engine/carver.h"
#include "engine/cpu/call.h"

// How a rank's two blocks of memory are divided: what forward saves, and what a call works in. One function computes
// sizes (with no memory) and pointers, so they can not disagree.
namespace uniep::cpu {

struct MemoryRequest {
  LayerShape shape;
  int64_t rows = 0;     // with padding
  bool staged = false;  // combine rows are kept locally before they are sent
  bool keep_xg = true;
};

using internal::Carver;

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

inline void carve_forward(Carver& carver, const MemoryRequest& request, RankBuffers& buffers) {
  if (!request.keep_xg) buffers.gathered[0] = carver.take<BFloat16>(request.rows * request.shape.hidden);
  buffers.activation = carver.take<BFloat16>(request.rows * request.shape.intermediate);
  if (request.staged) buffers.output_rows = carver.take<BFloat16>(request.rows * request.shape.hidden);
}

inline void carve_backward(Carver& carver, const MemoryRequest& request, RankBuffers& buffers) {
  const int64_t rows = request.rows;
  buffers.gathered[0] = carver.take<BFloat16>(rows * request.shape.hidden);
  if (!request.keep_xg) buffers.gathered[1] = carver.take<BFloat16>(rows * request.shape.hidden);
  buffers.activation = carver.take<BFloat16>(rows * request.shape.intermediate);
  buffers.dz = carver.take<BFloat16>(rows * 2 * request.shape.intermediate);
  buffers.prob_chunks = carver.take<float>(rows * divide_up(request.shape.intermediate, 64));
  if (request.staged) buffers.output_rows = carver.take<BFloat16>(rows * request.shape.hidden);
}

}  // namespace uniep::cpu
