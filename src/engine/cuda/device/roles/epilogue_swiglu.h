#pragma once

#include "engine/cuda/device/roles/epilogue.h"

// FC1's epilogue (a, and z if asked) and FC2 dgrad's (a again, dz and dprob's 64-column sums).
namespace uniep::cuda {

// A row's router weight; +0 where the row does not exist.
UNIEP_DEVICE float row_prob(const GemmArguments& arguments, const WarpTile& tile, int32_t row) {
  return row < tile.rows ? __ldg(arguments.prob + tile.row + row) : 0.0f;
}

UNIEP_DEVICE uint32_t swiglu_pair(uint32_t gate, uint32_t up, float prob) {
  return pack_bfloat16(swiglu(unpack_low(gate), unpack_low(up), prob),
                       swiglu(unpack_high(gate), unpack_high(up), prob));
}

// The accumulators' first half is gate columns, the second half the matching up columns.
template <GemmConfig kConfig, int kCount>
UNIEP_DEVICE void store_swiglu(const GemmArguments& arguments, BFloat16* z, const WarpTile& tile,
                               const float (&d)[kCount]) {
  constexpr int32_t kColumns = kConfig.tile_n / 2;
  const int32_t row = static_cast<int32_t>(ptx::lane_index()) / 4;
  const float prob_upper = row_prob(arguments, tile, row);
  const float prob_lower = row_prob(arguments, tile, row + 8);
#pragma unroll
  for (int32_t part = 0; part < kColumns / kBlockColumns; ++part) {
    const int32_t column = tile.column + part * kBlockColumns;
    const int32_t columns_left = arguments.n_extent - column;
    uint32_t gate[16];
    uint32_t up[16];
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) {
      gate[i] = pack_bfloat16(d[part * 32 + 2 * i], d[part * 32 + 2 * i + 1]);
      up[i] = pack_bfloat16(d[kCount / 2 + part * 32 + 2 * i], d[kCount / 2 + part * 32 + 2 * i + 1]);
    }
    const auto write = [&](const uint32_t(&m)[16], BFloat16* pointer, int64_t leading) {
#pragma unroll
      for (int32_t pair = 0; pair < 4; ++pair) {
        put_fragment(tile.block, pair, m[4 * pair], m[4 * pair + 1], m[4 * pair + 2], m[4 * pair + 3]);
      }
      __syncwarp();
      write_block<true>(tile.block, {pointer + tile.row * leading + column, leading, tile.rows, columns_left});
      __syncwarp();
    };
    if (z != nullptr) {
      write(gate, z, arguments.output_leading);
      write(up, z + arguments.n_extent, arguments.output_leading);
    }
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) gate[i] = swiglu_pair(gate[i], up[i], i % 2 == 0 ? prob_upper : prob_lower);
    write(gate, arguments.activation, arguments.n_extent);
  }
}

// z's blocks of a warp: part p of the tile uses pair p % 2 (gate, up) and is fetched two parts ahead.
UNIEP_DEVICE uint32_t gate_block(const WarpTile& tile, int32_t part) {
  return tile.block + part % 2 * (2 * kStagingBlockBytes);
}
UNIEP_DEVICE uint32_t up_block(const WarpTile& tile, int32_t part) { return gate_block(tile, part) + kStagingBlockBytes; }

template <GemmConfig kConfig>
UNIEP_DEVICE void fetch_z(const GemmArguments& arguments, const WarpTile& tile, int32_t part) {
  const int32_t column = tile.column + part * kBlockColumns;
  const int64_t leading = 2 * static_cast<int64_t>(arguments.n_extent);
  const int32_t columns = arguments.n_extent - column;
  const BFloat16* const gate = arguments.saved + tile.row * leading + column;
  fetch_block(gate_block(tile, part), gate, leading, tile.rows, columns);
  fetch_block(up_block(tile, part), gate + arguments.n_extent, leading, tile.rows, columns);
}

// Before the tile's products: the first two parts of z are on their way while the tensor cores work.
template <GemmConfig kConfig>
UNIEP_DEVICE void begin_swiglu_gradient(const GemmArguments& arguments, const WarpTile& tile) {
#pragma unroll
  for (int32_t part = 0; part < 2; ++part) {
    fetch_z<kConfig>(arguments, tile, part);
    ptx::copy_async_commit();
  }
}

template <GemmConfig kConfig, int kCount>
UNIEP_DEVICE void store_swiglu_gradient(const GemmArguments& arguments, BFloat16* dz, const WarpTile& tile,
                                        const float (&d)[kCount]) {
  constexpr int32_t kParts = kConfig.tile_n / kBlockColumns;
  static_assert(kBlockColumns == kProbChunkColumns, "a part is one chunk of dprob's sum");
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  const int32_t row = lane / 4;
  const float prob[2] = {row_prob(arguments, tile, row), row_prob(arguments, tile, row + 8)};
  const int64_t dz_leading = arguments.output_leading;
#pragma unroll
  for (int32_t part = 0; part < kParts; ++part) {
    const int32_t column = tile.column + part * kBlockColumns;
    const int32_t columns_left = arguments.n_extent - column;
    const uint32_t gates = gate_block(tile, part);
    const uint32_t ups = up_block(tile, part);
    ptx::copy_async_wait<1>();
    __syncwarp();
    uint32_t activation[16];
    float prob_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t pair = 0; pair < 4; ++pair) {
      uint32_t gate[4];
      uint32_t up[4];
      get_fragment(gates, pair, gate);
      get_fragment(ups, pair, up);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float* const da = d + part * 32 + pair * 8 + i * 2;
        const float weight = prob[i % 2];
        const SwigluGradient low = swiglu_gradient(unpack_low(gate[i]), unpack_low(up[i]), weight, da[0]);
        const SwigluGradient high = swiglu_gradient(unpack_high(gate[i]), unpack_high(up[i]), weight, da[1]);
        activation[4 * pair + i] = pack_bfloat16(low.activation, high.activation);
        gate[i] = pack_bfloat16(low.gate, high.gate);
        up[i] = pack_bfloat16(low.up, high.up);
        prob_sum[i % 2] = add(add(prob_sum[i % 2], low.prob_term), high.prob_term);
      }
      __syncwarp();
      put_fragment(gates, pair, gate[0], gate[1], gate[2], gate[3]);
      put_fragment(ups, pair, up[0], up[1], up[2], up[3]);
    }
    __syncwarp();
    BFloat16* const dz_gate = dz + tile.row * dz_leading + column;
    write_block<true>(gates, {dz_gate, dz_leading, tile.rows, columns_left});
    write_block<true>(ups, {dz_gate + arguments.n_extent, dz_leading, tile.rows, columns_left});
    __syncwarp();
#pragma unroll
    for (int32_t pair = 0; pair < 4; ++pair) {
      put_fragment(gates, pair, activation[4 * pair], activation[4 * pair + 1], activation[4 * pair + 2],
                   activation[4 * pair + 3]);
    }
    __syncwarp();
    const int64_t leading = arguments.n_extent;
    write_block<true>(gates, {arguments.activation + tile.row * leading + column, leading, tile.rows, columns_left});
    __syncwarp();
    if (part + 2 < kParts) fetch_z<kConfig>(arguments, tile, part + 2);
    ptx::copy_async_commit();
    // Lane q of a quad holds partial q: (p0 + p1) + (p2 + p3).
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const float own = prob_sum[half];
      const float pair_sum = add(own, __shfl_xor_sync(0xffffffffu, own, 1));
      const float sum = add(pair_sum, __shfl_xor_sync(0xffffffffu, pair_sum, 2));
      const int32_t at = row + half * 8;
      if (lane % 4 == 0 && columns_left > 0) {
        const int64_t chunk = column / kProbChunkColumns;
        arguments.prob_chunks[chunk * arguments.prob_stride + tile.row + at] = at < tile.rows ? sum : 0.0f;
      }
    }
  }
}

}  // namespace uniep::cuda
