#pragma once

#include <cuda.h>

#include <memory>
#include <vector>

#include "comm/signals.h"
#include "comm/symmetric_memory.h"
#include "engine/cuda/exchange.h"
#include "engine/cuda/kernel.h"
#include "program/build.h"

namespace uniep::cuda {

struct ExchangeRequest {
  ProgramRequest program;  // `workers` is how many SMs of each GPU copy
  std::shared_ptr<const internal::PlacementState> placement;
  std::vector<int> devices;  // of each rank; ranks of one GPU stand side by side
  ExchangeConfig dispatch, combine;
  double wait_seconds = 60.0;
  double arrival_seconds = 600.0;
};

// Dispatch and combine of one placement, over all ranks of this process, with memory of their own: what tests and
// measurements of the communication alone run.
class ExchangeSession {
 public:
  explicit ExchangeSession(const ExchangeRequest& request);
  ~ExchangeSession();
  ExchangeSession(const ExchangeSession&) = delete;
  ExchangeSession& operator=(const ExchangeSession&) = delete;

  const Program& program() const { return *program_; }
  const SignalLayout& layout() const { return layout_; }
  int64_t slot_count() const { return slot_count_; }
  int64_t prob_chunk_count() const { return prob_chunk_count_; }

  // A rank's arrays, in its GPU's memory.
  struct Arrays {
    BFloat16* input;        // [T, H]
    BFloat16* rows;         // [padded rows, H] what dispatch fills
    BFloat16* output_rows;  // [padded rows, H] what combine returns
    BFloat16* slots;        // [T, slot_count, H]
    BFloat16* output;       // [T, H]
    float* prob_chunks;     // [padded rows, prob_chunk_count]
    float* prob_slots;      // [T, K]
    float* dprobs;          // [T, K]
    uint32_t* counters;     // [2, layout.counter_total]
  };
  const Arrays& arrays(int rank) const { return ranks_[rank].arrays; }
  uint32_t* epoch(int rank) const { return signals_->epoch(rank); }

  // Queues the operation on the default stream of each GPU. `ranks`: only so many of the first ranks take part (tests).
  void dispatch(int ranks = kMostCudaRanks) { run(dispatch_, ranks); }
  void combine(int ranks = kMostCudaRanks) { run(combine_, ranks); }

  void synchronize();
  void check() { signals_->check(); }  // waits for the GPUs; throws kTimeout
  void recover() { signals_->recover(); }

 private:
  struct RankState {
    Arrays arrays{};
    std::vector<CUdeviceptr> owned;
  };
  struct Operation {
    ExchangeConfig config;
    KernelRequest kernel;
    std::vector<const RankCall*> calls;  // of each GPU, in its memory
  };
  struct Gpu {
    int device = 0;
    int first_rank = 0, ranks = 0;
    std::unique_ptr<KernelStore> kernels;
  };

  template <typename T>
  T* allocate(int rank, int64_t count);
  template <typename T>
  const T* upload(int rank, const T* values, int64_t count);
  void upload_tables(int rank, RankProgram& p);
  void allocate_arrays(int rank);
  RankCall call_of(int rank, const RankProgram& p);
  void prepare(Operation& operation, const ExchangeConfig& config, ProgramPart part);
  void run(const Operation& operation, int ranks);

  ExchangeRequest request_;
  std::unique_ptr<Program> program_;
  SignalLayout layout_;
  int64_t slot_count_, prob_chunk_count_;
  // Offsets in a rank's symmetric memory, equal on all ranks.
  int64_t input_at_ = 0, table_at_ = 0, rows_at_ = 0, slots_at_ = 0, prob_slots_at_ = 0;
  std::unique_ptr<SymmetricMemory> memory_;
  std::unique_ptr<Signals> signals_;
  std::vector<RankState> ranks_;
  std::vector<RankProgram> programs_;  // with tables in device memory
  std::vector<Gpu> gpus_;
  Operation dispatch_, combine_;
};

}  // namespace uniep::cuda
