#pragma once

#include "engine/cuda/kernels/layer_kernels.h"
#include "program/rank_program.h"
#include "uniep/schedule.h"

namespace uniep::cuda {

// Throws uniep::Error (kUnsupported) where tokens have more slots or groups than the kernels sum.
void require_summable(const LayerShape& shape, const Numerics& numerics);

// Throws uniep::Error (kUnsupported) where a task's record, which has 16 bits for each count, has no room.
void require_countable(const LayerShape& shape);
void require_countable_rows(int64_t rows, int rank, Direction direction);

// Throws uniep::Error (kUnsupported) for a backward Schedule that this engine has no kernels for. A legal Schedule has.
void require_instantiable(const Schedule& schedule, const Numerics& numerics, Direction direction);

// What a launch's kernel is compiled for: exactly what a legal Schedule says.
LayerKernelConfig launch_config(const Schedule& schedule, const Numerics& numerics, Direction direction,
                                const LaunchStages& stages);

// Whether a launch has weight gradients alone: they run in kernels of their own (grouped_launch.h).
bool is_weight_gradients_alone(const LaunchStages& stages);
GemmConfig weight_gradient_config(const Schedule& schedule, const Numerics& numerics, GemmStage stage);

// CTAs that share tiles of weights, in every launch of a call.
int cluster_of(const Schedule& schedule, Direction direction);

}  // namespace uniep::cuda
