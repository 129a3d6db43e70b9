#pragma once

#include <cstdint>

#include "program/rank_program.h"

namespace uniep::cuda {

// How long a lent worker stays, and the CTAs that follow it: so many that lent workers last as long as the launch, by
// its GEMMs' FLOPs, and half as long again.
struct LentSlices {
  int64_t ns = 0;    // 0: to the end
  int32_t ctas = 0;  // beside RankProgram::workers
};

// `shortest_ns`: of a slice; tests have shorter ones than lent_slices.cpp's.
LentSlices lent_slices(const program::RankProgram& program, const program::LaunchStages& stages,
                       int64_t shortest_ns = 0);

}  // namespace uniep::cuda
