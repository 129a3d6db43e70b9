#pragma once

#include <string>
#include <vector>

#include "tests/cuda/device_layer.h"

namespace uniep::cuda::test {

// What a backward call reads and writes beside CallArrays: of this process's ranks, on their devices.
struct BackwardArrays {
  struct OfRank {
    DeviceArray dy, dx, dprobs;
  };
  std::vector<OfRank> local;
};

// Where weight gradients go; several calls may write to the same. By address: the experts' tensors lie in the reverse
// order, so that only who uses the addresses finds them.
struct GradientArrays {
  struct OfRank {
    DeviceArray dw1, dw2;  // apart: dw1 holds all gates, then all ups
    std::vector<void*> dw1_experts, dw1_up_experts, dw2_experts;
  };
  bool by_address = false;
  bool apart = false;
  std::vector<OfRank> local;
};

// How a work's gradients are made.
struct GradientCall {
  bool dw1 = true, dw2 = true;
  int sms = 0;
  bool aside = false;  // on streams of their own
};

// Of local ranks, or none: the allocator's.
struct OwnMemory {
  std::vector<CallerMemory> workspace, pending;
};

// Backward of a DeviceLayer, in the same streams. main_grad begins with cli::start_main_grad.
class DeviceBackward {
 public:
  explicit DeviceBackward(DeviceLayer& layer, const PartialSchedule& given = {});
  ~DeviceBackward();
  DeviceBackward(const DeviceBackward&) = delete;
  DeviceBackward& operator=(const DeviceBackward&) = delete;

  const Schedule& schedule() const { return schedule_; }
  void use_schedule(const PartialSchedule& given);
  CUstream aside_of(std::size_t local) const { return asides_[local]; }

  // Of backward calls from now on: a tensor an expert, or two.
  void give_weights_by_address(bool apart = false);

  BackwardArrays arrays(const std::vector<int64_t>& tokens) const;
  GradientArrays gradients(bool by_address = false, bool apart = false) const;

  // In the order of the layer's streams. upload() also poisons dx and dprobs; start() writes what gradients hold
  // before, which is poison unless they are added to.
  void upload(const BackwardArrays& arrays, const cli::LayerData& data) const;
  void start(const GradientArrays& gradients) const;

  // `gradients` null: no addresses.
  PendingWeightGradients backward(const CallArrays& call, const BackwardArrays& arrays, const Saved& saved,
                                  const GradientArrays* gradients, const MemoryOptions& use = {},
                                  const OwnMemory& memory = {});
  // What is aside follows the layer's streams.
  void make(const PendingWeightGradients& work, const GradientArrays& gradients, const GradientCall& call = {});
  // The layer's streams follow what is aside.
  void join_aside() const;

  // Of this process's ranks, what the streams hold now.
  cli::LayerResult read(const BackwardArrays& arrays, const CallArrays& call) const;
  cli::LayerResult read(const GradientArrays& gradients) const;
  // y, dx, dprobs and the gradients that the oracle gives, of this process's ranks.
  cli::LayerResult oracle(const cli::LayerData& data) const { return oracle(data, layer_.config().numerics); }
  cli::LayerResult oracle(const cli::LayerData& data, const Numerics& numerics) const;
  // What start() writes.
  cli::LayerResult started() const;

  // Record whether these hold the expected bytes; true: they do.
  bool expect(const std::string& name, const BackwardArrays& arrays, const CallArrays& call,
              const cli::LayerResult& expected);
  // dw1, dw2 or both.
  bool expect(const std::string& name, const GradientArrays& gradients, const cli::LayerResult& expected,
              bool dw1 = true, bool dw2 = true);

 private:
  std::size_t local_ranks() const { return asides_.size(); }
  int64_t dprobs_of_token() const {
    return layer_.gives_maps() ? layer_.config().shape.experts : layer_.config().shape.topk;
  }
  bool is_bf16() const { return layer_.config().numerics.weight_gradient == WeightGradient::kBFloat16; }
  int64_t element_bytes() const { return is_bf16() ? sizeof(BFloat16) : sizeof(float); }
  int64_t local_experts() const { return layer_.config().shape.experts / layer_.group().ranks(); }
  int64_t expert_elements() const {  // of dw2; dw1: twice
    return layer_.config().shape.intermediate * layer_.config().shape.hidden;
  }
  void* half_of_dw1(const GradientArrays& gradients, std::size_t local, int64_t expert, int64_t half) const;
  WeightGradients addresses(const GradientArrays& gradients, std::size_t local, bool dw1, bool dw2) const;
  bool record(const std::string& name, const cli::LayerResult& got, const cli::LayerResult& expected);

  DeviceLayer& layer_;
  Schedule schedule_;
  std::vector<CUstream> asides_;  // of each local rank
  std::vector<CUevent> events_;
  struct WeightAddresses {
    std::vector<const BFloat16*> w1, w1_up, w2;
  };
  std::vector<WeightAddresses> weight_addresses_;  // of each local rank; empty: whole tensors
};

}  // namespace uniep::cuda::test
