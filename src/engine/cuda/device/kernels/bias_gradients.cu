// The gradients of experts' biases, and their terms of dprob. Sums are in the order of model/bias_sums.h.
//
// Grid: (CTAs, experts). A CTA takes kBiasDotColumns columns of dy or dz. A warp takes whole blocks of rows, a lane
// eight neighbours of each row; the blocks' sums meet in shared memory.
#include "engine/cuda/device/arguments/bias_arguments.h"
#include "engine/cuda/device/ptx/bfloat16_pair.h"
#include "engine/cuda/device/ptx/common.h"
#include "model/bias_sums.h"

namespace uniep::cuda {

static_assert(kBiasLaneColumns == 8, "a lane loads 16 bytes of a row");
static_assert(kBiasDotColumns <= kBiasThreads, "a thread a column joins the blocks' sums");

struct alignas(16) LaneColumns {
  float value[kBiasLaneColumns];
};

struct RowChunk {
  uint32_t pair[kBiasLaneColumns / 2];
};

UNIEP_DEVICE RowChunk load_chunk(const BFloat16* at) {
  const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(at));
  return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}

// One lane's columns of one gradient.
struct LaneSum {
  const BiasArguments& args;
  const BiasSum& sum;
  int32_t column;
  bool exists;
  RowChunk bias;  // b2, where there are dots
  float* dots;    // of these columns, or null
};

UNIEP_DEVICE void add_dot(const LaneSum& lane, const RowChunk& row, int64_t at) {
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kBiasLaneColumns / 2; ++i) {
    dot = add(dot, mul(unpack_low(row.pair[i]), unpack_low(lane.bias.pair[i])));
    dot = add(dot, mul(unpack_high(row.pair[i]), unpack_high(lane.bias.pair[i])));
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) dot = add(dot, __shfl_xor_sync(0xffffffffu, dot, half));
  if (ptx::lane_index() == 0) lane.dots[at] = dot;
}

// A block of rows from `first`. Loads of several rows are under way at once.
UNIEP_DEVICE LaneColumns sum_block(const LaneSum& lane, int64_t first, int32_t count) {
  constexpr int kAhead = 8;
  LaneColumns sums{};
  const BFloat16* const at = lane.sum.values + first * lane.sum.columns + lane.column;
#pragma unroll 1
  for (int32_t begin = 0; begin < count; begin += kAhead) {
    RowChunk rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool exists = lane.exists && begin + i < count;
      rows[i] = exists ? load_chunk(at + static_cast<int64_t>(begin + i) * lane.sum.columns) : RowChunk{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i >= count) break;
      const int64_t row = first + begin + i;
      if (lane.dots != nullptr) add_dot(lane, rows[i], row);
      const float prob = lane.sum.weighs != 0 ? __ldg(&lane.args.rows[row].prob) : 1.0f;
#pragma unroll
      for (int pair = 0; pair < kBiasLaneColumns / 2; ++pair) {
        float& low = sums.value[2 * pair];
        float& high = sums.value[2 * pair + 1];
        low = fused_multiply_add(prob, unpack_low(rows[i].pair[pair]), low);
        high = fused_multiply_add(prob, unpack_high(rows[i].pair[pair]), high);
      }
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

// Columns from `first_column` on. `dots`: of these, or null.
UNIEP_DEVICE void run_columns(const BiasArguments& args, const BiasSum& sum, int32_t first_column, float* dots) {
  __shared__ LaneColumns blocks[kBiasWarps][32];
  const auto expert = static_cast<int32_t>(blockIdx.y), thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32, lane_index = thread % 32;
  const int32_t rows = args.expert_rows[expert];
  const int64_t segment = args.segment_start[expert];
  const int32_t column = first_column + lane_index * kBiasLaneColumns;
  LaneSum lane{args, sum, column, column < sum.columns, {}, dots};
  if (dots != nullptr && lane.exists) lane.bias = load_chunk(args.b2[expert] + column);
  const bool joins = sum.is_made != 0 && thread < kBiasDotColumns && first_column + thread < sum.columns;
  float total = 0.0f;  // of column first_column + thread
  for (int32_t begin = 0; begin < rows; begin += kBiasWarps * kBiasRows) {
    const int32_t first = begin + warp * kBiasRows;
    if (first < rows) blocks[warp][lane_index] = sum_block(lane, segment + first, min(kBiasRows, rows - first));
    __syncthreads();
    for (int32_t i = 0; joins && i < kBiasWarps && begin + i * kBiasRows < rows; ++i) {
      total = add(total, blocks[i][thread / kBiasLaneColumns].value[thread % kBiasLaneColumns]);
    }
    __syncthreads();
  }
  if (joins) write_sum(args.kind, sum.gradients[expert], first_column + thread, total, rows > 0);
}

extern "C" __global__ void __launch_bounds__(kBiasThreads, 2)
    uniep_bias_gradients(const __grid_constant__ BiasArguments args) {
  if (args.failed != nullptr && *args.failed != 0) return;
  const auto cta = static_cast<int32_t>(blockIdx.x);
  const int32_t of_dy = (args.sums[0].columns + kBiasDotColumns - 1) / kBiasDotColumns;
  if (cta < of_dy) {
    float* const dots = args.dots == nullptr ? nullptr : args.dots + cta * args.dot_stride;
    run_columns(args, args.sums[0], cta * kBiasDotColumns, dots);
  } else {
    run_columns(args, args.sums[1], (cta - of_dy) * kBiasDotColumns, nullptr);
  }
}

}  // namespace uniep::cuda
