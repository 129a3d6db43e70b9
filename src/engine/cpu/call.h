#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "engine/cpu/fault.h"
#include "engine/cpu/kernels.h"
#include "engine/cpu/signals.h"
#include "engine/cpu/worker_pair.h"
#include "engine/disturbance.h"
#include "model/activation_choice.h"
#include "program/build.h"

// One call of the CPU engine: what all agents of all ranks share while it runs.
namespace uniep::cpu {

struct BitFault;

// A rank's memory in a call. Names follow the forward direction; in backward the first GEMM makes dz, the second dxg.
struct RankBuffers {
  // Read by peers, or written by them.
  const BFloat16* input[kMaxOperands] = {};  // [T, H] x, or dy and x again
  BFloat16* gathered[kMaxOperands] = {};     // [rows, H] xg, or dyg and xg again
  BFloat16* slots = nullptr;                 // [T, slot_count, H] rows on their way into the ordered sum
  float* prob_slots = nullptr;               // [T, K] dprobs on their way
  // Used by this rank alone.
  BFloat16* z = nullptr;            // [rows, z columns]: 2 I, or I where there is no gate
  BFloat16* activation = nullptr;   // [rows, I]
  BFloat16* dz = nullptr;           // [rows, z columns]
  const BFloat16* xg = nullptr;     // [rows, H] for dW1
  float* prob_chunks = nullptr;     // [prob_terms(), prob_stride] each row's terms of dprob
  int64_t prob_stride = 0;          // rows that there is room for
  BFloat16* output_rows = nullptr;  // [rows, H] o or dxg, when the combine is staged
  BFloat16* output = nullptr;       // [T, H] y or dx
  float* dprobs = nullptr;          // [T, K], or [T, E]
  bool dense_dprobs = false;
  std::vector<const BFloat16*> w1, w1_up, w2;  // [El]; w1: the gate rows, or all; w1_up: null where there are none
  std::vector<void*> dw1, dw1_up, dw2;         // [El]
  std::vector<const BFloat16*> b1, b2;         // [El]; read with Numerics::bias alone, as the next
  std::vector<void*> db1, db2;                 // [El]
};

struct Call {
  Call(const Program& called_program, const Kernels& called_kernels, std::vector<RankSignals>& group_signals,
       WakeUp& group_wake_up, const std::atomic<bool>& group_aborted)
      : program(called_program),
        kernels(called_kernels),
        shape(program.request().shape),
        numerics(program.request().numerics),
        gated(is_gated(numerics.activation)),
        z_columns(uniep::z_columns(shape, numerics)),
        activation(called_kernels.activations[static_cast<int>(activation_kind(numerics))]
                                             [numerics.router_weight == RouterWeight::kInput ? 1 : 0]),
        activation_parameters(uniep::activation_parameters(numerics)),
        schedule(program.request().schedule),
        layout(signal_layout(program.rank(0))),
        ranks(program.ranks()),
        pairs(static_cast<std::size_t>(program.ranks()) * kMaxLaunches * pairs_of_rank()),
        signals(group_signals),
        wake_up(group_wake_up),
        aborted(group_aborted) {}

  const Program& program;
  const Kernels& kernels;
  LayerShape shape;
  Numerics numerics;
  bool gated;
  int64_t z_columns;
  ActivationRows activation;
  ActivationParameters activation_parameters;
  Schedule schedule;
  SignalLayout layout;
  uint32_t epoch = 1;
  int64_t slot_count = 0;  // rows of `slots` a token: K, or the number of combine groups
  std::vector<RankBuffers> ranks;
  std::vector<WorkerPair> pairs;  // [rank, launch, pair]
  std::vector<RankSignals>& signals;
  WakeUp& wake_up;
  const std::atomic<bool>& aborted;
  internal::Disturbance disturbance;
  Fault fault = Fault::kNone;
  BitFault* bit_fault = nullptr;
  double timeout_seconds = 60;
  bool record = false;

  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  std::atomic<int64_t> last_progress_ns{0};  // when any agent last finished a tile
  std::atomic<int32_t> running_tiles{0};
  std::atomic<bool> stopped{false};
  std::mutex failure_mutex;
  std::exception_ptr failure;

  int pairs_of_rank() const { return program.rank(0).cluster == 2 ? program.rank(0).workers / 2 : 0; }
  WorkerPair& pair(int rank, int launch, int worker) {
    return pairs[(static_cast<std::size_t>(rank) * kMaxLaunches + launch) * pairs_of_rank() + worker / 2];
  }
  int64_t now_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  }
  void fail(const std::exception_ptr& reason) {
    const std::lock_guard<std::mutex> lock(failure_mutex);
    if (failure == nullptr) failure = reason;
    stopped.store(true, std::memory_order_relaxed);
    wake_up.notify();
  }
};

}  // namespace uniep::cpu
