#pragma once

#include "engine/cuda/run_time_compiler.h"
#include "support/random_layer.h"
#include "uniep/uniep.h"

namespace uniep::cuda::test {

constexpr int64_t kMostGroups = 32;  // that the engine sums

// Where peers' memory comes from: one process that drives all ranks, or a process a rank and NCCL's windows.
enum class Heap { kLocal, kNccl };

// Ranks of a case over NCCL share their Group, and so their workers, with others of the same part.
constexpr int kParts = 3;
constexpr int part_of(uint64_t seed) {
  return static_cast<int>(seed % kParts);
}

struct CaseOptions {
  int devices = 1;                             // local: that the ranks are dealt over; NCCL: at most so many ranks
  int processors = 132;                        // of a device; as many as an H100 or H200 SXM has
  bool random_heap = false;                    // else local
  bool any_kernel = false;                     // whatever the engine has a kernel for; else few different
  std::vector<std::string> tiles = {"256:2"};  // few: tile.n and tile.cluster
  std::string fixed;                           // fields of every Schedule
};

// How one layer is run.
struct LayerCase {
  int ranks = 1;
  Heap heap = Heap::kLocal;
  int part = 0;
  int workers = 0;
  Capacity capacity;
  Schedule schedule;
};

// A random layer, and two ways to run it: on its own number of ranks, and on one. No ways where the engine refuses the
// layer. The same for the same arguments everywhere; needs no GPU.
struct LayerCases {
  uniep::test::RandomLayer layer;
  std::vector<LayerCase> cases;
};
LayerCases draw_cases(uint64_t seed, const uniep::test::RandomLayerLimits& limits, const CaseOptions& options);

std::string to_text(const LayerCase& layer_case);

// The kernels that the megakernel's launches take.
std::vector<KernelRequest> kernels_of(const LayerCase& layer_case, const Numerics& numerics);

}  // namespace uniep::cuda::test
