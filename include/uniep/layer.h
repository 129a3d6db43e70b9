#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "uniep/bfloat16.h"
#include "uniep/export.h"
#include "uniep/group.h"
#include "uniep/numerics.h"
#include "uniep/preparation.h"
#include "uniep/schedule.h"
#include "uniep/shape.h"

// The MoE layer on a Group. Every array argument lies on the device of its rank, is row-major and dense, and stays
// valid until the rank's stream has passed the call (on the cpu engine: until the call returns). Spans hold one entry
// per local rank, in rank order. All errors are thrown before anything runs, but for time-outs, overflow and failures
// of the device.
namespace uniep {

enum class IndexType : int { kInt32 = 0, kInt64 = 1 };

// One rank's router output.
struct Routing {
  int64_t tokens = 0;              // T, may differ from rank to rank and may be 0
  const void* topk_ids = nullptr;  // [T, K] global expert of a slot, -1 = unused; no expert twice in a row
  IndexType index_type = IndexType::kInt32;
  const float* probs = nullptr;  // [T, K] fp32, finite; an unused slot's is ignored
  Stream stream{};
  // Dense routing, with topk_ids null: [T, E], a byte for each expert, not 0 where the token goes to it. probs is then
  // [T, E], too, and ignored where the map is 0. A token's slots are its experts, ascending, the slots after them
  // unused; more than K experts are refused. backward() and combine() with such a placement write dprobs [T, E], +0
  // where the map is 0.
  const uint8_t* routing_map = nullptr;
};

namespace internal {
struct PlacementState;
struct SavedState;
struct PendingState;
}  // namespace internal

// Where each (token, slot) pair lands: rows grouped by local expert, inside an expert by (source rank, token, slot),
// each expert's segment at a multiple of 128 rows. Immutable, cheap to copy, shared by forward and backward.
class UNIEP_API Placement {
 public:
  Placement() = default;
  explicit Placement(std::shared_ptr<const internal::PlacementState> state) : state_(std::move(state)) {}
  bool empty() const { return state_ == nullptr; }

  int64_t rows(int rank) const;                           // routed rows that the rank's experts receive
  int64_t padded_rows(int rank) const;                    // with every segment padded to a multiple of 128
  int64_t tokens(int rank) const;                         // T of the rank
  bool dense(int rank) const;                             // of a local rank: its dprobs are [T, E]
  int64_t expert_rows(int64_t expert) const;              // routed rows of a global expert
  int64_t expert_segment(int64_t expert) const;           // first row of the expert's segment on its owner
  int64_t routed(int source_rank, int64_t expert) const;  // rows that a rank sends to an expert
  const std::shared_ptr<const internal::PlacementState>& state() const { return state_; }

 private:
  std::shared_ptr<const internal::PlacementState> state_;
};

// Fixed memory instead of memory by need, equal on all ranks. A rank that would receive more raises Error(kOverflow)
// that names rank, expert, need and capacity. On GPUs place() does not wait for them within a capacity: asking the
// Placement for its rows does, and what is wrong with a routing is thrown there or by a later call; such a placement is
// empty. Such calls may be captured into a CUDA graph (docs/hopper.md).
struct Capacity {
  int64_t rows = 0;    // padded rows of any rank, at most; 0: by need (the host waits for the number of rows)
  int64_t tokens = 0;  // T of any rank, at most; needed with one process per rank, otherwise 0 stands for any number
};

// Collective. Ids out of range, an expert twice in one token, a map with more than K experts in one token, probs that
// are not finite: Error(kInvalidArgument).
UNIEP_API Placement place(Group& group, const LayerShape& shape, std::span<const Routing> routings,
                          Capacity capacity = {});

// A rank's expert weights: one tensor over its El local experts, or El addresses. Gate and up may be separate: with
// w1_up (or w1_up_experts) w1 (or w1_experts) is the gate alone. Both are then one tensor, or both are addresses. How
// weights are given changes no bit.
struct Weights {
  const BFloat16* w1 = nullptr;                    // [El, 2 I, H]: gate rows, then up rows; with w1_up [El, I, H]
  const BFloat16* w2 = nullptr;                    // [El, H, I]
  const BFloat16* const* w1_experts = nullptr;     // or El tensors [2 I, H] or [I, H]; takes precedence over w1
  const BFloat16* const* w2_experts = nullptr;     // or El tensors [H, I]
  const BFloat16* w1_up = nullptr;                 // [El, I, H], or null: w1 holds both
  const BFloat16* const* w1_up_experts = nullptr;  // or El tensors [I, H]
  // With Numerics::bias, otherwise null. b1 is one tensor also where gate and up of W1 are separate.
  // [El, 2 I]: gate, then up; without a gate [El, I]. Backward ignores it but with save.z = recompute.
  const BFloat16* b1 = nullptr;
  const BFloat16* b2 = nullptr;                 // [El, H]
  const BFloat16* const* b1_experts = nullptr;  // or El tensors [2 I] or [I]
  const BFloat16* const* b2_experts = nullptr;  // or El tensors [H]
};

// Where weight gradients go: bf16 or fp32, as Numerics::weight_gradient says; one tensor or El addresses, gate and up
// in one tensor or separate, as in Weights, but not necessarily as the weights of the same call are. A rank without
// gradients to make (all null) is refused: every local expert gets one, zero rows give zeros. On cuda gate and up
// apart, with I no multiple of 16 and weight gradients in the launch of dgrad FC1 (fusion = pairs, backward.wgrad =
// fill), is Error(kUnsupported).
struct WeightGradients {
  void* dw1 = nullptr;
  void* dw2 = nullptr;
  void* const* dw1_experts = nullptr;
  void* const* dw2_experts = nullptr;
  void* dw1_up = nullptr;
  void* const* dw1_up_experts = nullptr;
  // With Numerics::bias, otherwise null: as Weights' biases. db1 is made with dw1, and db2 with dw2.
  void* db1 = nullptr;
  void* db2 = nullptr;
  void* const* db1_experts = nullptr;
  void* const* db2_experts = nullptr;
};

struct LayerConfig {
  LayerShape shape{};
  Numerics numerics{};
};

// When a backward's weight gradients are made. No choice changes a bit of any result.
enum class WeightGradientTime : int {
  kNow = 0,    // by backward() itself
  kLater = 1,  // by weight_gradients(), from what backward() returns
  kNone = 2,   // never: the experts are frozen
};

// Memory that the caller has for a call and keeps: at an address that is a multiple of kMemoryAlignment, on the rank's
// device, used in the order of the call's stream. Null: the allocator's. Less than memory_need() says:
// Error(kOutOfMemory), which the other ranks are notified of. Another alignment: Error(kInvalidArgument).
struct CallerMemory {
  void* data = nullptr;
  std::size_t bytes = 0;
};
inline constexpr std::size_t kMemoryAlignment = 64;

// What a call will ask the allocator for, per local rank: one block each (none for 0 bytes).
struct MemoryNeed {
  std::size_t saved_bytes = 0;      // lives in the Saved that forward returns
  std::size_t workspace_bytes = 0;  // freed when the call is over
  std::size_t symmetric_bytes = 0;  // held by the group, shared by all layers, grown when a call needs more
  std::size_t pending_bytes = 0;    // lives in the PendingWeightGradients that backward returns (kLater)
};
// What decides a call's memory besides its schedule and its placement.
struct MemoryOptions {
  WeightGradientTime weight_gradients = WeightGradientTime::kNow;  // of a backward, as in BackwardArguments
  bool last_use = false;                                           // of a backward, as in BackwardArguments
  bool keep_saved = true;                                          // of a forward, as in CallOptions
  Direction direction = Direction::kForward;
};
// Begins to compile the kernels of such a call in the background, where they are not compiled; asked again it says how
// far that is. Not collective; it waits for nothing and loads nothing, and another thread may be inside a call. A
// call of what is not ready compiles it itself. On cpu all is ready. Throws Error(kInvalidArgument) where the Schedule
// is not legal, and Error(kUnsupported) where the engine has no such kernel or no compiler.
UNIEP_API Preparation prepare(Group& group, const LayerConfig& config, const Schedule& schedule,
                              const MemoryOptions& options = {});

UNIEP_API std::vector<MemoryNeed> memory_need(const Group& group, const LayerConfig& config, const Schedule& schedule,
                                              const Placement& placement, const MemoryOptions& options = {});

// When each tile ran, for timelines and tests. Times are nanoseconds of one steady clock, 0 = the call's start.
struct TileEvent {
  int rank = 0;
  int worker = 0;
  bool copy_agent = false;    // else the compute agent
  const char* stage = "";     // "dispatch", "fc1", ..., "combine", "reduce"
  int expert = -1;            // global expert, or -1
  int m = 0, n = 0;           // the tile's block coordinates; m of "reduce": 32 tokens in the order of the sums
  int64_t wait_begin_ns = 0;  // when the agent began to wait for the tile's inputs
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

class CallTimer;

struct CallOptions {
  std::vector<TileEvent>* events = nullptr;  // filled with the call's events, in no particular order
  CallTimer* timer = nullptr;                // of this group: it times the call (uniep/call_timer.h)
  // Of a forward that no backward follows: false keeps nothing, and the Saved is empty. z is then workspace.
  bool keep_saved = true;
};

struct ForwardArguments {
  const BFloat16* x = nullptr;  // [T, H]
  Weights weights{};
  BFloat16* y = nullptr;  // [T, H], written
  Stream stream{};
  // Stays as it is until the Saved's last use; then attach_saved() makes another Saved of it.
  CallerMemory saved_memory{};
  CallerMemory workspace_memory{};  // free after the call
};

// What backward needs, one per forward call; several may be outstanding, in any order. Frees its memory through the
// group's allocator; must not outlive the Group.
class UNIEP_API Saved {
 public:
  Saved() = default;
  explicit Saved(std::shared_ptr<internal::SavedState> state) : state_(std::move(state)) {}
  bool empty() const { return state_ == nullptr; }
  // z of a local rank: [padded_rows, 2 I], bf16, gate columns first; rows of padding hold no meaning, and none does
  // after a backward with last_use. Null without rows, and with save.z = recompute.
  const BFloat16* z(int rank) const;
  const Placement& placement() const;
  internal::SavedState& state() const { return *state_; }

 private:
  std::shared_ptr<internal::SavedState> state_;
};

// Collective. y[t] = sum over slots k of W2[e] (silu(gate) * up * prob), with [gate, up] = W1[e] x[t]; other
// activations, biases and places of prob as Numerics says.
UNIEP_API Saved forward(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
                        std::span<const ForwardArguments> arguments, const CallOptions& options = {});

// A Saved of what a forward left in `saved_memory`, one entry per local rank, of just the bytes that memory_need()
// says: of a forward with this shape, save.xg, save.z, routing and capacity, also where `placement` is another one of
// that routing and capacity, and the bytes have been copied since. The memory stays the caller's. What a backward with
// last_use has used up gives no error here, and no gradients. Not collective.
UNIEP_API Saved attach_saved(Group& group, const LayerConfig& config, const Schedule& schedule,
                             const Placement& placement, std::span<const CallerMemory> memory);

struct BackwardArguments {
  const BFloat16* dy = nullptr;  // [T, H]
  // [T, H] as in forward; read only when xg was not kept (save.xg = redispatch) and weight gradients are wanted or z
  // was not kept either (save.z = recompute)
  const BFloat16* x = nullptr;
  Weights weights{};
  BFloat16* dx = nullptr;       // [T, H], written
  float* dprobs = nullptr;      // [T, K], written; an unused slot's is +0; of a dense routing [T, E]
  WeightGradients gradients{};  // kNow only; otherwise ignored and may be null
  Stream stream{};
  WeightGradientTime weight_gradients = WeightGradientTime::kNow;  // equal on all ranks
  // The last use of `saved`: z becomes dz in its own memory, which saves 4 I bytes per padded row (with save.z =
  // recompute it does so anyway). From the moment that the call runs the Saved is used up, also if the call fails
  // half-way. Equal on all ranks.
  bool last_use = false;
  CallerMemory workspace_memory{};  // free after the call
  CallerMemory pending_memory{};    // kLater: free when the PendingWeightGradients' last weight_gradients() is over
};

// What weight_gradients() needs, one per backward call with kLater. Several may be outstanding, to be finished in any
// order or dropped. Keeps the memory of the Saved alive where xg or dz lies in it. Cheap to copy; copies are the same
// work. Frees its memory through the group's allocator with the last copy; must not outlive the Group.
class UNIEP_API PendingWeightGradients {
 public:
  PendingWeightGradients() = default;
  explicit PendingWeightGradients(std::shared_ptr<internal::PendingState> state) : state_(std::move(state)) {}
  bool empty() const { return state_ == nullptr; }
  internal::PendingState& state() const { return *state_; }

 private:
  std::shared_ptr<internal::PendingState> state_;
};

// Collective. Uses the Placement of `saved`, which may be used again (a second backward gives the same bits) until a
// call with last_use; after it, Error(kInvalidArgument). Returns an empty work unless weight_gradients is kLater.
UNIEP_API PendingWeightGradients backward(Group& group, const LayerConfig& config, const Schedule& schedule,
                                          const Saved& saved, std::span<const BackwardArguments> arguments,
                                          const CallOptions& options = {});

struct WeightGradientArguments {
  WeightGradients gradients{};
  Stream stream{};  // any; what backward left is waited for
  int sms = 0;      // compute units (on cuda SMs) that work on it at most, 1 to Group::workers(); 0: all
};

// Makes the weight gradients that a backward with kLater left, with the bits that kNow gives. Not collective: each
// process calls it when it likes, of its own local ranks, and peers take no part. Where gradients are added (kMainGrad)
// the sum is in the order of the calls that write to one address, so that calls on several streams are the caller's to
// order. Addresses of both gradients, or on all local ranks of dw1 alone or of dw2 alone: then only that one is made,
// and the other may be made by a later call. Each gradient of a work is made once: a second time is
// Error(kInvalidArgument). Only memory of the work itself is read, of the weights none.
UNIEP_API void weight_gradients(Group& group, const PendingWeightGradients& work,
                                std::span<const WeightGradientArguments> arguments);

}  // namespace uniep
