#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "uniep/uniep.h"

namespace uniep::cli {

// Ranks that follow each other.
struct RankRange {
  int first = 0;
  int count = 0;
};

// A global batch: the tokens of all ranks, rank after rank, and all experts. A process that runs some of the ranks has
// no need of the others' x, dy and weights: they may begin at a later rank's.
struct LayerData {
  LayerShape shape;
  std::vector<int64_t> tokens;  // of each rank
  int first_rank = 0;           // the first whose x, dy, weights and biases are there
  std::vector<BFloat16> x;      // [sum T, H]
  std::vector<BFloat16> dy;     // [sum T, H], empty without backward
  std::vector<int32_t> ids;     // [sum T, K]
  std::vector<float> probs;     // [sum T, K]
  std::vector<BFloat16> w1;     // [E, halves I, H]
  std::vector<BFloat16> w2;     // [E, H, I]
  int64_t halves = 2;           // of w1: gate and up, or 1 where there is no gate
  std::vector<BFloat16> b1;     // [E, halves I]; this and b2: empty without biases
  std::vector<BFloat16> b2;     // [E, H]

  int64_t all_tokens() const { return first_token(static_cast<int>(tokens.size())); }
  int64_t first_token(int rank) const;  // in global order
  int64_t tokens_of(RankRange ranks) const { return first_token(ranks.first + ranks.count) - first_token(ranks.first); }
  // What a rank has.
  const BFloat16* x_of(int rank) const { return x.data() + token_offset(rank); }
  const BFloat16* dy_of(int rank) const { return dy.data() + token_offset(rank); }
  const BFloat16* w1_of(int rank) const { return w1.data() + halves * expert_offset(rank); }
  const BFloat16* w2_of(int rank) const { return w2.data() + expert_offset(rank); }
  const BFloat16* b1_of(int rank) const { return b1.data() + halves * expert_offset(rank) / shape.hidden; }
  const BFloat16* b2_of(int rank) const { return b2.data() + expert_offset(rank) / shape.intermediate; }

 private:
  int64_t token_offset(int rank) const { return (first_token(rank) - first_token(first_rank)) * shape.hidden; }
  int64_t expert_offset(int rank) const {
    return (rank - first_rank) * (shape.experts / static_cast<int64_t>(tokens.size())) * shape.intermediate *
           shape.hidden;
  }
};

// What the layer gives, in global order: of all ranks, or of a few.
struct LayerResult {
  std::vector<BFloat16> y;                   // [sum T, H]
  std::vector<BFloat16> z;                   // [rows, halves I] by expert and row, without padding
  bool has_z = true;                         // not with save.z=recompute
  std::vector<BFloat16> dx;                  // [sum T, H]
  std::vector<float> dprobs;                 // [sum T, K]
  std::vector<BFloat16> dw1_bf16, dw2_bf16;  // as Numerics::weight_gradient says, one pair is filled
  std::vector<float> dw1_fp32, dw2_fp32;
  std::vector<BFloat16> db1_bf16, db2_bf16;  // likewise; empty without biases
  std::vector<float> db1_fp32, db2_fp32;
  std::vector<std::string> differences(const LayerResult& other) const;  // names of tensors whose bytes differ
  bool operator==(const LayerResult& other) const { return differences(other).empty(); }
};

// The main_grad that a synthetic run starts from, by flat element index: small, exact, and different everywhere.
float start_main_grad(uint64_t index);

// How a batch is handed to the engine. None of it changes a result, but for where main_grad starts.
struct RunnerOptions {
  Capacity capacity = {};
  bool by_address = false;  // weights and gradients: a tensor an expert
  bool apart = false;       // gate and up of W1 and of its gradient: a tensor each
  bool later = false;       // weight gradients by a call of their own
  // The routing as a map of experts. The batch's slots must be those of a map: ids ascending, unused slots last.
  bool dense = false;
  float (*main_grad)(uint64_t index) = start_main_grad;  // what gradients in fp32 hold before backward()
};

// Runs the layer on a global batch with the ranks of a group: forward() as often as wanted, then backward().
class LayerRunner {
 public:
  // Rank by rank what its engine reads and writes lies on its device; on the cpu engine it is the batch itself.
  LayerRunner(Group& group, const LayerConfig& config, const LayerData& data, const RunnerOptions& options = {});

  const Placement& placement() const { return placement_; }
  void place();  // again, from the same routing
  void forward(const Schedule& schedule, std::vector<TileEvent>* events = nullptr, CallTimer* timer = nullptr);
  // With main_grad the gradients start from RunnerOptions::main_grad, anew at every call.
  void backward(const Schedule& schedule, std::vector<TileEvent>* events = nullptr, CallTimer* timer = nullptr);
  // The last call of the direction again under another Schedule, for its time alone: results and gradients stay as they
  // are, and nothing goes from or to the host.
  void repeat(Direction direction, const Schedule& schedule);
  // On GPUs, one such call of each, up to sixteen queued behind each other and one more, as in training, and how long
  // each took on the slowest rank, in milliseconds; whose times a process knows is as above.
  std::vector<double> repeat_in_turn(Direction direction, std::span<const Schedule> schedules);
  // Bytes of a thread that the kernels of such calls spill for want of registers; of a call that has run.
  int spilled_bytes(Direction direction, const Schedule& schedule) const;
  // Of what this process's ranks have of y, or of the gradients, whatever the engine.
  uint64_t checksum(Direction direction) const;
  // How long the engine took for the last forward() or backward(): on the slowest rank. In a process that has a few of
  // the ranks, rank 0 is one that knows the others' times and events.
  double milliseconds() const { return milliseconds_; }
  // y and z, and after backward() the gradients. Collective where the ranks are in several processes: rank 0's gets
  // them, the others nothing.
  LayerResult result() const;

 private:
  // Of a local rank's experts: one tensor, or one an expert.
  using ExpertArrays = std::vector<cuda::DeviceArray>;
  // A rank's arrays on its GPU.
  struct DeviceRank {
    cuda::DeviceArray ids, probs, x, y;  // ids: of a dense routing the map
    ExpertArrays w1, w1_up, w2, b1, b2;
    cuda::DeviceArray dy, dx, dprobs;  // these and the next from backward() on
    ExpertArrays dw1, dw1_up, dw2, db1, db2;
  };
  // What the arguments of a rank point to: its experts' tensors.
  struct RankAddresses {
    std::vector<const BFloat16*> w1, w1_up, w2, b1, b2;
    std::vector<void*> dw1, dw1_up, dw2, db1, db2;
  };
  // On the cpu engine, what the batch and the results do not hold as it is given.
  struct HostRank {
    std::vector<std::byte> gate, up, dgate, dup;
    std::vector<uint8_t> map;
    std::vector<float> dense_probs, dense_dprobs;
  };

  bool on_devices() const { return !device_ranks_.empty(); }
  RankRange local_ranks() const { return {group_.first_local_rank(), group_.local_ranks()}; }
  bool has_all_ranks() const { return group_.local_ranks() == group_.ranks(); }
  int64_t local_experts() const { return config_.shape.experts / group_.ranks(); }
  bool has_bf16_gradients() const { return config_.numerics.weight_gradient == WeightGradient::kBFloat16; }
  int64_t gradient_bytes() const { return has_bf16_gradients() ? sizeof(BFloat16) : sizeof(float); }
  int64_t expert_elements() const { return config_.shape.intermediate * config_.shape.hidden; }  // of w2
  int64_t halves() const { return data_.halves; }                                                // times that: of w1
  LayerResult local_result() const;
  void copy_to_devices();
  static std::vector<const BFloat16*> collect(const ExpertArrays& arrays);
  static std::vector<void*> collect_outputs(const ExpertArrays& arrays);
  ExpertArrays split(int device, const void* values, int64_t bytes) const;
  void make_host_rank(int local);
  Routing routing(int local);
  std::byte* dw1_of(LayerResult& result, int local) const;
  void split_gradients(int local);
  void join_gradients(int local);
  void gather_dense_dprobs(int local, const std::vector<float>& dense, LayerResult& result) const;
  int64_t dprobs_of_token() const { return options_.dense ? config_.shape.experts : config_.shape.topk; }
  Weights weights(int local);
  void add_biases(int local, Weights& weights);
  void start_host_gradients();
  void add_bias_gradients(int local, WeightGradients& gradients);
  void start_gradients(int local);
  WeightGradients gradients(int local);
  void queue_backward(const Schedule& schedule, const std::vector<BackwardArguments>& arguments,
                      const CallOptions& options);
  // Its arguments are made, and what an earlier forward saved is given back.
  std::function<void()> call_again(Direction direction, const Schedule& schedule);
  void read_gradients(int local, LayerResult& result) const;
  // On GPUs, the time between two points of their streams.
  void timed(const std::function<void()>& call);
  std::vector<ForwardArguments> forward_arguments();
  std::vector<BackwardArguments> backward_arguments(const Schedule& schedule);

  Group& group_;
  LayerConfig config_;
  const LayerData& data_;
  RunnerOptions options_;
  Placement placement_;
  Saved saved_;
  LayerResult out_;  // of the local ranks, as all that follows
  std::vector<RankAddresses> addresses_;
  std::vector<HostRank> host_ranks_;
  std::vector<DeviceRank> device_ranks_;
  std::vector<std::unique_ptr<cuda::DeviceTimer>> device_timers_;  // of calls under way
  double milliseconds_ = 0;
};

}  // namespace uniep::cli
