#pragma once

#include <cuda.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "support/random_layer.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/graph_functions.h"
#include "uniep/uniep.h"

namespace uniep::cuda::test {

// Where the arguments of one call lie: of this process's ranks, on their devices.
struct CallArrays {
  struct OfRank {
    DeviceArray ids, probs, x, y;  // ids: of a dense routing the map
    const BFloat16* input;         // what the call is given as x: `x`, or memory of a test's own
  };
  std::vector<int64_t> tokens;  // of every rank
  Capacity capacity;            // room for any routing of them
  SymmetricBuffer buffer;       // where the inputs lie in one
  std::vector<OfRank> local;
};

// A captured call, or several.
class CapturedCalls {
 public:
  CapturedCalls(CUgraph graph, CUgraphExec executable) : graph_(graph), executable_(executable) {}
  ~CapturedCalls();
  CapturedCalls(CapturedCalls&& other) noexcept;
  CapturedCalls& operator=(CapturedCalls&&) = delete;
  CUgraphExec executable() const { return executable_; }

 private:
  CUgraph graph_ = nullptr;
  CUgraphExec executable_ = nullptr;
};

// A group for tests on these GPUs, and one of processes.
GroupOptions group_options(int ranks, const std::vector<int>& devices);
GroupOptions process_options(int ranks);

// One forward layer on a Group, through the public calls, in a stream of each of its devices; eagerly and in graphs.
// Every process of a group does the same with the same seeds, and compares the bytes of its own ranks with the naive
// oracle's. Calls and replays of one process follow each other on all its devices.
class DeviceLayer {
 public:
  // `shape` over options.ranks ranks. `folder`: of the tests' kernels.
  DeviceLayer(const GroupOptions& options, const LayerConfig& config, Results& results, const std::string& folder);
  ~DeviceLayer();
  DeviceLayer(const DeviceLayer&) = delete;
  DeviceLayer& operator=(const DeviceLayer&) = delete;

  Group& group() { return group_; }
  const LayerConfig& config() const { return config_; }
  Results& results() { return results_; }
  Kernels& kernels() { return kernels_; }
  int rank_of(std::size_t local) const { return group_.first_local_rank() + static_cast<int>(local); }
  int device_of(std::size_t local) const;
  CUstream stream_of(std::size_t local) const;
  uniep::Weights weights_of(std::size_t local) const;
  const Schedule& schedule() const { return schedule_; }
  void use_schedule(const PartialSchedule& given);  // instead of the default
  // Routings from now on, of all arrays and batches: maps of experts.
  void give_maps() { maps_ = true; }
  bool gives_maps() const { return maps_; }

  // About `most` tokens a rank; not the same number on each.
  std::vector<int64_t> tokens(int64_t most) const;
  CallArrays arrays(const std::vector<int64_t>& tokens, bool in_symmetric_buffer = false);
  // Random tokens and routing, and the layer's weights.
  cli::LayerData batch(const std::vector<int64_t>& tokens);
  // The same routing with another x.
  cli::LayerData with_other_x(const cli::LayerData& data);

  // With dy.
  cli::LayerData with_dy(const cli::LayerData& data);

  // In the order of the streams. upload() also poisons y.
  void upload(const CallArrays& arrays, const cli::LayerData& data);
  void poison(const CallArrays& arrays);

  Placement place(const CallArrays& arrays, Capacity capacity = {});
  Saved forward(const CallArrays& arrays, const Placement& placement);
  // Both.
  struct Called {
    Placement placement;
    Saved saved;
  };
  Called call(const CallArrays& arrays, Capacity capacity = {});

  void begin_capture();
  CUgraph end_capture();
  CapturedCalls capture(const std::function<void()>& calls);
  void replay(const CapturedCalls& captured);

  // Waits, and records whether y holds the oracle's bytes.
  void expect(const std::string& name, const CallArrays& arrays, const cli::LayerData& data);
  // Likewise, whether all of y is NaN.
  void expect_nan(const std::string& name, const CallArrays& arrays);
  // Records whether `call` throws this Error with these words.
  void expect_error(const std::string& name, Status status, const std::vector<std::string>& words,
                    const std::function<void()>& call);
  void synchronize();

 private:
  struct OfDevice {
    int device;
    CUstream stream;
    CUevent event;
  };
  struct WeightArrays {
    DeviceArray w1, w2;
  };

  const OfDevice& of(std::size_t local) const { return devices_[device_index_[local]]; }
  void fork();  // what the other devices' streams hold from now on follows the first one's
  void join();  // and the other way round

  LayerConfig config_;
  bool maps_ = false;
  Results& results_;
  Group group_;
  Schedule schedule_;
  Kernels kernels_;
  GraphFunctions graphs_;
  uniep::test::Random random_{11};
  cli::LayerData weights_;  // and no tokens
  std::vector<OfDevice> devices_;
  std::vector<std::size_t> device_index_;     // of each local rank
  std::vector<WeightArrays> device_weights_;  // of each local rank
};

}  // namespace uniep::cuda::test
