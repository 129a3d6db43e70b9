#pragma once

#include "engine/cuda/device/arguments/signals.h"
#include "engine/cuda/device/ptx/tensor_map.h"
#include "program/edges.h"
#include "program/order.h"
#include "uniep/bfloat16.h"

// One rank's share of one call, in device memory: written by the host before the first launch of the call, read by all
// of its kernels. Nothing in it changes during the call.
namespace uniep::cuda {

constexpr int kMaxCudaSlots = 32;  // slots or combine groups of a token: a lane of a warp each

// Where an agent writes down when its tiles ran; a ring of `capacity` records for each agent.
struct TileRecord {
  uniep::Task task;
  uint32_t launch;
  uint32_t reserved;
  uint64_t wait_begin_ns, begin_ns, end_ns;  // %globaltimer
};
static_assert(sizeof(TileRecord) == 48, "laid out alike on the host and the device");

// z, dz and a as dSwiGLU moves them; then rows of dy and a, dz and x, as dW2 and dW1 multiply them.
constexpr int kGradientMaps = 7;
constexpr int kFirstWgradMap = 3;

// dW of this rank's experts: one tensor, or an address an expert.
struct GradientMatrices {
  void* base;
  void* const* addresses;
  int64_t expert_stride;  // bytes, of one tensor
  const TensorMap* maps;  // fp32, for TMA: one over the experts, or one an expert; else null
  int32_t box_rows;       // of the maps
};

// A bias of this rank's experts: one tensor, or an address an expert.
struct BiasVectors {
  const BFloat16* base;
  const BFloat16* const* addresses;
  int64_t expert_stride;  // elements, of one tensor

  UNIEP_HOST_DEVICE const BFloat16* of(int32_t expert) const {
    return addresses != nullptr ? addresses[expert] : base + expert * expert_stride;
  }
};

struct alignas(64) RankCall {
  // Operands of the row GEMMs: boxes of kTileM rows (A) or half a tile of columns (B) by 64 of K. In backward B's boxes
  // are 64 columns by 64 of K, or by 32 where a tile is no whole number of them.
  TensorMap first_a;               // xg [rows, H]; backward: rows of dy
  TensorMap second_a;              // a [rows, I]; backward: dz [rows, 2 I], without a gate [rows, I]
  const TensorMap* first_b;        // W1: one map over the local experts, or one an expert; backward: W2
  const TensorMap* second_b;       // W2; backward: W1
  const TensorMap* gradient_maps;  // [kGradientMaps], backward
  int32_t first_map_per_expert, second_map_per_expert;
  int32_t first_maps, second_maps;  // of B, in all
  // W1, gate and up apart: behind the gate's maps come as many of the up, and in backward of both again, with boxes of
  // kFewDepthRows. 0: one map holds both.
  int32_t up_maps;
  int32_t up_row;      // of the map that holds the up rows, where they begin: 0 apart, else I
  int32_t gate_depth;  // backward: K of the gate's map, without end where it holds both
  int32_t gate_rows;   // of dW1 in gradients[1]; the others are in gradients[2]

  RankProgram program;  // its tables lie in device memory
  SignalLayout layout;
  int64_t hidden, intermediate;
  int32_t slot_count;  // rows of `slot_rows` a token: K, or the number of combine groups

  // Signals. The epoch is advanced by the kernel that begins a call; counters of epoch e lie in bank e % 2.
  RankState* state;
  uint32_t* counters;              // [2][layout.counter_total]
  uint32_t* flags[kMaxCudaRanks];  // of every rank, as this rank reaches them
  uint64_t wait_limit_ns;          // for waits inside a rank and for data of peers that have arrived
  uint64_t arrival_limit_ns;       // for a peer to arrive

  // Memory that peers reach.
  const BFloat16* input[kMaxOperands][kMaxCudaRanks];  // [T, H] x, or dy and x again
  BFloat16* gathered_of[kMaxOperands][kMaxCudaRanks];  // [rows, H]; peers' only under push
  BFloat16* slot_rows[kMaxCudaRanks];                  // [T, slot_count, H]
  float* prob_slots[kMaxCudaRanks];                    // [T, K] dprobs on their way
  const RowSource* rows_of[kMaxCudaRanks];             // row tables; peers' only under push

  // Memory of this rank alone. Forward's names; in backward the first GEMM makes dz, the second dxg.
  // dW2, dW1, and dW1's up rows where they lie apart (as if its gate rows stood before them); where they are made in
  // the launch of dgrad FC1.
  GradientMatrices gradients[3];
  BFloat16* z;            // [rows, 2 I], without a gate [rows, I]
  BFloat16* activation;   // [rows, I]
  BFloat16* output_rows;  // [rows, H] o or dxg, when the combine is staged
  BFloat16* output;       // [T, H] y or dx
  float* dprobs;          // [T, K]
  float* prob_chunks;     // [prob_chunk_count][prob_stride] terms of dprob: sums of 64 columns, and of biases
  int32_t prob_stride, prob_chunk_count;
  float* row_probs;  // [padded rows] or null: what a standalone dispatch writes of the row table

  // Profiler: null, or [workers][2 agents: copy, compute][record_capacity], and how many records each has written.
  TileRecord* records;
  uint32_t* record_counts;  // [workers][2]
  uint32_t record_capacity;

  BiasVectors b1, b2;  // forward, where experts have them
};

// 0 is no epoch, since a new flag holds it; 1 is left out with it, so that neighbours never share a counter bank.
UNIEP_HOST_DEVICE uint32_t epoch_after(uint32_t epoch) {
  return epoch == 0xffffffffu ? 2 : epoch + 1;
}

// The rank's counter bank of the running call.
UNIEP_HOST_DEVICE uint32_t* counter_bank(const RankCall& call, uint32_t epoch) {
  return call.counters + (epoch & 1u) * call.layout.counter_total;
}

}  // namespace uniep::cuda
