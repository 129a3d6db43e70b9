#pragma once

#include "engine/cuda/device/arguments/rank_call.h"

// The argument of begin_call.cu.
namespace uniep::cuda {

constexpr int kMaxNotedGroups = 16;  // of a process on one GPU

struct BeginArguments {
  RankCall* calls;
  const uint32_t* whole[kMaxCudaRanks];  // of a rank's placement: 0 where it failed
  LaunchStages stages[kMaxLaunches];     // that the launches run
  CallDescription description;
  RunningNote running;
  int32_t groups;
  CallBoard* boards[kMaxNotedGroups];  // of this process on this GPU, that the note is left on
};
static_assert(sizeof(BeginArguments) < 4096, "passed as a kernel's argument");

}  // namespace uniep::cuda
