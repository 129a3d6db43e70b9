#pragma once

#include "model/portability.h"
#include "program/namespace.h"

// What a Hopper GPU was measured to take, as far as Programs and built-in defaults go by it: it moves work between
// workers and chooses among Schedules, never a bit. Another GPU's would be slower by the wrong ones, no more. What
// predictions go by is a machine description (sim/machine.h).
namespace uniep::program {

// A tile takes as long as its K columns and so many more (docs/layer_tuning.md).
inline constexpr int64_t kTileOverheadColumns = 384;

// A copied byte costs as much as this many floating-point operations of one SM (an H200's: 5.3 TFLOP/s of matrix GEMMs
// beside 37 GB/s of copying over NVLink).
inline constexpr double kOperationsPerCopiedByte = 140.0;

// Up to which I W / (W - 1) mixed waves gain in a layer of W ranks. For each row of an expert tensor cores do 6 H I
// operations; NVLink carries some 3.2 H bytes (out once for all of a token's rows on a rank, and every row back), but
// for the share that stays on its rank. At 740 TFLOP/s and 347 GB/s both take equally long at about 1140. They gain up
// to about 1500 between two GPUs; where eight send to each other, NVLink carries a sixth less.
inline constexpr int64_t kLinkBoundOfFew = 1500, kLinkBoundOfMany = 1800;
inline constexpr int64_t kManyRanks = 8;

}  // namespace uniep::program
