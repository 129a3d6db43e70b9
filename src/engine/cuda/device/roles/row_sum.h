#pragma once

#include "engine/cuda/device/ptx/memory.h"
#include "engine/cuda/device/ptx/warpgroup.h"
#include "engine/cuda/device/roles/staging.h"

namespace uniep::cuda {

constexpr int kVectorColumns = 8;  // bf16 values in 16 bytes

// How many 16-byte loads a lane has in flight: of `vectors` places in the row, `loads` summands each.
struct SumDepth {
  int vectors;
  int loads;
};
constexpr SumDepth kShallowSum{1, 4};  // for a warp with few registers
constexpr SumDepth kDeepSum{2, 8};

UNIEP_DEVICE void add_vector(float (&sum)[kVectorColumns], const ptx::Vector16& values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = add(sum[2 * i], unpack_low(values.word[i]));
    sum[2 * i + 1] = add(sum[2 * i + 1], unpack_high(values.word[i]));
  }
}

UNIEP_DEVICE ptx::Vector16 rounded(const float (&sum)[kVectorColumns]) {
  ptx::Vector16 values;
#pragma unroll
  for (int i = 0; i < 4; ++i) values.word[i] = pack_bfloat16(sum[2 * i], sum[2 * i + 1]);
  return values;
}

// A warp's sum of rows: in fp32, summands ascending from +0, rounded once. There are `count` summands at most;
// `used(word)` is the mask of those of [32 word, 32 word + 32) that exist, asked by the whole warp, and `row(i)` where
// summand i begins.
template <SumDepth kDepth, typename Used, typename Row>
UNIEP_DEVICE void sum_rows(int32_t count, int32_t columns, Used&& used, Row&& row, BFloat16* out) {
  constexpr int32_t kStep = ptx::kThreadsPerWarp * kVectorColumns;
  const int32_t first = static_cast<int32_t>(ptx::lane_index()) * kVectorColumns;
  uint32_t mask = used(0);
  for (int32_t begin = 0; begin < columns; begin += kStep * kDepth.vectors) {
    float sum[kDepth.vectors][kVectorColumns] = {};
    for (int32_t word = 0; word * 32 < count; ++word) {
      if (count > 32) mask = used(word);
      for (uint32_t left = mask; left != 0;) {
        ptx::Vector16 values[kDepth.loads][kDepth.vectors];
        uint32_t taken = 0;
#pragma unroll
        for (int load = 0; load < kDepth.loads; ++load) {
          if (left == 0) continue;
          const BFloat16* const summand = row(word * 32 + __ffs(static_cast<int>(left)) - 1);
          left &= left - 1;
          taken |= 1u << load;
#pragma unroll
          for (int v = 0; v < kDepth.vectors; ++v) {
            const int32_t column = begin + v * kStep + first;
            if (column < columns) values[load][v] = ptx::load_global_16_once(summand + column);
          }
        }
#pragma unroll
        for (int load = 0; load < kDepth.loads; ++load) {
          if ((taken >> load & 1u) == 0) continue;
#pragma unroll
          for (int v = 0; v < kDepth.vectors; ++v) add_vector(sum[v], values[load][v]);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kDepth.vectors; ++v) {
      const int32_t column = begin + v * kStep + first;
      if (column < columns) ptx::store_global_16(out + column, rounded(sum[v]));
    }
  }
}

}  // namespace uniep::cuda
