#pragma once

#include "model/portability.h"
#include "program/namespace.h"
#include "uniep/direction.h"

namespace uniep::program {

// What one tile of work does. The two row GEMMs have a name a direction: first = fc1 or dgrad_fc2, second = fc2 or
// dgrad_fc1.
enum class Stage : int32_t {
  kPull = 0,  // dispatch by the owner: reads peers' rows
  kPush,      // dispatch by the source: writes rows into the owner's memory
  kReceive,   // what the owner does about pushed rows: local copies, zero padding, readiness
  kFirstGemm,
  kSecondGemm,
  kWgradFc2,
  kWgradFc1,
  kSend,       // combine, staged: rows of one block to their source ranks
  kGroupSend,  // combine with groups: the sums of one block of tokens to their rank
  kReduce,     // combine: the ordered sum over a token's slots
};
inline constexpr int kStageCount = 10;

// One tile, and the record that a scheduler hands to an agent. The coordinates' meaning by stage:
//   kPull                     expert: local       m: row block in the expert    n: operand * pull_parts + part
//   kReceive                  expert: local       m: row block in the expert    n: operand (0: x or dy, 1: x again)
//   kPush                     expert: global      m: row block in the expert    n: operand
//   kFirstGemm, kSecondGemm   expert: local       m: row block in the expert    n: column tile
//   kWgradFc2, kWgradFc1      expert: local       m: tile of dW's rows          n: tile of dW's columns
//   kSend                     expert: local       m: row block in the expert    n: column chunk
//   kGroupSend                expert: destination rank   m: token block         n: column chunk
//   kReduce                   expert: -1          m: token block, in the order of summed_token()   n: column chunk
// In clusters a GEMM's position may have no tile (m = kNoTile): its worker only keeps its neighbour company.
inline constexpr int32_t kNoTile = -1;

struct Task {
  Stage stage;
  int32_t expert;
  int32_t m;
  int32_t n;

  UNIEP_HOST_DEVICE bool has_tile() const { return m != kNoTile; }
};
static_assert(sizeof(Task) == 16, "a task travels through a ring of 16-byte records");

#ifndef __CUDACC_RTC__
inline const char* stage_name(Stage stage, Direction direction) {
  const bool forward = direction == Direction::kForward;
  switch (stage) {
    case Stage::kPull:
    case Stage::kPush:
      return "dispatch";
    case Stage::kReceive:
      return "receive";
    case Stage::kFirstGemm:
      return forward ? "fc1" : "dgrad_fc2";
    case Stage::kSecondGemm:
      return forward ? "fc2" : "dgrad_fc1";
    case Stage::kWgradFc2:
      return "wgrad_fc2";
    case Stage::kWgradFc1:
      return "wgrad_fc1";
    case Stage::kSend:
    case Stage::kGroupSend:
      return "combine";
    case Stage::kReduce:
      return "reduce";
  }
  return "unknown";
}
#endif

}  // namespace uniep::program
