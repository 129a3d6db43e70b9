// The gradients of experts' biases, and their part in dprob. Sums are in the order of model/bias_sums.h.
//
// Grid: (CTAs, experts). The first CTAs make kBiasColumns columns of db2 or db1 each, one after the other; the others
// share the expert's rows of dprob. A warp sums whole blocks of rows; the blocks' sums meet in shared memory.
#include "engine/cuda/device/arguments/bias_arguments.h"
#include "engine/cuda/device/ptx/bfloat16_pair.h"
#include "engine/cuda/device/ptx/common.h"
#include "engine/cuda/device/ptx/memory.h"
#include "model/bias_sums.h"

namespace uniep::cuda {

constexpr int kLaneColumns = kBiasColumns / 32;
static_assert(kLaneColumns == 4, "a lane loads 8 bytes");
static_assert(kBiasDotChains == 32 && kBiasDotColumns == 8, "a chain of dy . b2 is a lane's, which loads 16 bytes");

struct Columns {
  float value[kLaneColumns];
};

// One block of rows from `first`, this lane's columns. Loads of several rows are under way at once.
UNIEP_DEVICE Columns sum_block(const BiasSum& sum, const RowSource* rows, int64_t first, int32_t count,
                               int32_t column) {
  constexpr int kAhead = 16;
  Columns sums{};
  const BFloat16* at = sum.values + first * sum.columns + column;
  for (int32_t row = 0; row < count; row += kAhead) {
    uint2 loaded[kAhead];
    float prob[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool exists = row + i < count;
      loaded[i] = exists ? __ldg(reinterpret_cast<const uint2*>(at + static_cast<int64_t>(row + i) * sum.columns))
                         : uint2{0, 0};
      prob[i] = exists && sum.weighs != 0 ? __ldg(&rows[first + row + i].prob) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row + i >= count) break;
      sums.value[0] = fused_multiply_add(prob[i], unpack_low(loaded[i].x), sums.value[0]);
      sums.value[1] = fused_multiply_add(prob[i], unpack_high(loaded[i].x), sums.value[1]);
      sums.value[2] = fused_multiply_add(prob[i], unpack_low(loaded[i].y), sums.value[2]);
      sums.value[3] = fused_multiply_add(prob[i], unpack_high(loaded[i].y), sums.value[3]);
    }
  }
  return sums;
}

UNIEP_DEVICE void write_sum(BiasGradientKind kind, void* gradient, int32_t column, float sum, bool has_rows) {
  if (kind == BiasGradientKind::kBFloat16) {
    static_cast<BFloat16*>(gradient)[column] = to_bfloat16(sum);
  } else if (kind == BiasGradientKind::kFloat32) {
    static_cast<float*>(gradient)[column] = sum;
  } else if (has_rows) {
    float& grown = static_cast<float*>(gradient)[column];
    grown = add(grown, sum);
  }
}

UNIEP_DEVICE void make_gradient(const BiasArguments& args, const BiasSum& sum, int32_t first_column) {
  __shared__ Columns blocks[kBiasWarps][32];
  const auto expert = static_cast<int32_t>(blockIdx.y);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t rows = args.expert_rows[expert];
  const int64_t segment = args.segment_start[expert];
  const int32_t column = first_column + lane * kLaneColumns;
  const bool exists = column < sum.columns;
  const bool joins = threadIdx.x < kBiasColumns;
  float total = 0.0f;  // of column first_column + threadIdx.x
  for (int32_t begin = 0; begin < rows; begin += kBiasWarps * kBiasRows) {
    const int32_t first = begin + warp * kBiasRows;
    if (exists && first < rows) {
      blocks[warp][lane] = sum_block(sum, args.rows, segment + first, min(kBiasRows, rows - first), column);
    }
    __syncthreads();
    for (int32_t i = 0; joins && i < kBiasWarps && begin + i * kBiasRows < rows; ++i) {
      total = add(total, blocks[i][threadIdx.x / kLaneColumns].value[threadIdx.x % kLaneColumns]);
    }
    __syncthreads();
  }
  const int32_t own = first_column + static_cast<int32_t>(threadIdx.x);
  if (joins && own < sum.columns) write_sum(args.kind, sum.gradients[expert], own, total, rows > 0);
}

UNIEP_DEVICE float bias_dot(const BFloat16* dy, const BFloat16* b2, int32_t hidden) {
  const auto lane = static_cast<int32_t>(ptx::lane_index());
  float chain = 0.0f;
#pragma unroll 4
  for (int32_t column = lane * kBiasDotColumns; column < hidden; column += kBiasDotChains * kBiasDotColumns) {
    const uint4 row = __ldg(reinterpret_cast<const uint4*>(dy + column));
    const uint4 bias = __ldg(reinterpret_cast<const uint4*>(b2 + column));
    const uint32_t rows[4] = {row.x, row.y, row.z, row.w}, biases[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      chain = add(chain, mul(unpack_low(rows[i]), unpack_low(biases[i])));
      chain = add(chain, mul(unpack_high(rows[i]), unpack_high(biases[i])));
    }
  }
#pragma unroll
  for (int half = kBiasDotChains / 2; half > 0; half /= 2) {
    chain = add(chain, __shfl_xor_sync(0xffffffffu, chain, half));
  }
  return chain;
}

UNIEP_DEVICE void add_dots(const BiasArguments& args, int32_t cta) {
  const auto expert = static_cast<int32_t>(blockIdx.y);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int64_t segment = args.segment_start[expert];
  for (int32_t i = cta * kBiasWarps + warp; i < args.expert_rows[expert]; i += args.dot_ctas * kBiasWarps) {
    const int64_t row = segment + i;
    const float dot = bias_dot(args.dyg + row * args.hidden, args.b2[expert], args.hidden);
    if (ptx::lane_index() == 0) args.dprobs[row] = add(args.dprobs[row], dot);
  }
}

extern "C" __global__ void __launch_bounds__(kBiasThreads)
    uniep_bias_gradients(const __grid_constant__ BiasArguments args) {
  if (args.failed != nullptr && *args.failed != 0) return;
  auto cta = static_cast<int32_t>(blockIdx.x);
  for (const BiasSum& sum : args.sums) {
    const int32_t ctas = (sum.columns + kBiasColumns - 1) / kBiasColumns;
    if (cta < ctas) return make_gradient(args, sum, cta * kBiasColumns);
    cta -= ctas;
  }
  add_dots(args, cta);
}

}  // namespace uniep::cuda
