#pragma once

#include <span>
#include <vector>

#include "engine/cuda/device/arguments/rank_call.h"
#include "engine/cuda/memory/symmetric_region.h"
#include "engine/cuda/place/placed_tables.h"

namespace uniep::cuda {

// What a call gives one of this process's ranks.
struct RankBinding {
  int rank = 0;
  int64_t rows = 0;                          // that its blocks have room for
  const BFloat16* input[kMaxOperands] = {};  // the caller's
  BFloat16* gathered[kMaxOperands] = {};
  BFloat16* z = nullptr;
  BFloat16* activation = nullptr;
  BFloat16* dz = nullptr;  // of backward alone
  BFloat16* output_rows = nullptr;
  BFloat16* output = nullptr;
  float* row_probs = nullptr;    // written by a standalone dispatch
  float* prob_chunks = nullptr;  // of backward's first GEMM; what a standalone combine returns
  int32_t prob_chunk_count = 0;
  float* dprobs = nullptr;
  float* dense_dprobs = nullptr;  // [T, E], made of the slots' behind the call; `dprobs` is not used then
  Weights weights;                // none where no GEMM runs
  WeightGradients gradients;      // where the launch of dgrad FC1 makes them
  const RowSource* row_table = nullptr;
  const uint32_t* whole = nullptr;  // PlacementTables
  uint32_t* counters = nullptr;
  TileRecord* records = nullptr;
  uint32_t* record_counts = nullptr;
  uint32_t record_capacity = 0;
};

// What is the same for all ranks of a call.
struct CallBinding {
  const ProgramRequest& request;
  const SymmetricRegion& symmetric;
  std::vector<const BFloat16*> inputs[kMaxOperands];  // of every rank, as kernels of this process reach them
  CallDescription description;
  double wait_seconds = 60, arrival_seconds = 600;
};

// Whether dW1's gate and up lie apart.
bool is_apart(const WeightGradients& gradients);

// Throws Error(kUnsupported).
[[noreturn]] void refuse_push();

// The RankCalls of those of `ranks` that share a device (`locals`: their places), followed by their tensor maps: the
// bytes to be uploaded to `memory`, which has room for call_image_bytes().
std::size_t call_image_bytes(const CallBinding& call, const std::vector<RankBinding>& ranks,
                             std::span<const std::size_t> locals);
std::vector<std::byte> call_image(const CallBinding& call, const std::vector<RankBinding>& ranks,
                                  std::span<const std::size_t> locals, const std::vector<DeviceProgram>& programs,
                                  std::byte* memory);

}  // namespace uniep::cuda
