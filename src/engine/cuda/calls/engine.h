#pragma once

#include <memory>
#include <span>
#include <string>

#include "engine/engine.h"

namespace uniep::cuda {

// The Hopper engine for a group's completed options. Throws Error (kUnsupported) where there is no Hopper GPU, or where
// the library was built without CUDA's headers.
std::unique_ptr<internal::Engine> make_engine(const GroupOptions& options);

// A GPU's name.
std::string device_label(int device);
// Its SMs.
int compute_units(int device);
// What else its speed depends on, as far as it is known: "driver 580.95.05, 700 W".
std::string speed_label(int device);
// The kernels' sources, in which builds of one version may differ: "kernels 1f3870be".
std::string kernels_label();

// Whether this process can use a Hopper GPU.
bool has_hopper_gpu();

// What a layer needs on each rank of a group on such GPUs, which need not be there; a process a GPU copies its inputs.
std::vector<MemoryNeed> memory_need(const Machine& machine, const LayerConfig& config, const Schedule& schedule,
                                    const Placement& placement, const MemoryOptions& options);

struct CompiledCall {
  LayerConfig layer;
  int ranks = 1, workers = 132;
  Schedule schedule;
  Direction direction = Direction::kForward;
};
// Compiles what these calls launch into the process's cache, so many kernels at once (0: one a processor); needs no
// GPU. Calls that no kernel is built for are left out. How many kernels they have.
int compile_calls(std::span<const CompiledCall> calls, int threads = 0);

}  // namespace uniep::cuda
