#pragma once

#include "engine/cuda/device/rank_call.h"
#include "engine/cuda/device/roles/copy_ring.h"
#include "engine/cuda/device/roles/staging.h"

// A warp's sum of rows: in fp32, summands ascending from +0, rounded once. Lane i holds the begin of summand i, where
// bit i of `summands` is set; `columns` is a multiple of 8. Two ways that give the same bits: through registers, by
// warps that have many, and through a copy ring, by warps that have few.
namespace uniep::cuda {

constexpr int kVectorColumns = 8;  // bf16 values in 16 bytes
constexpr uint32_t kVectorBytes = 16;

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

// kVectors * kLoads 16-byte loads of a lane are in flight: so many places in the row, so many summands each.
template <int kVectors, int kLoads>
class RegisterSum {
 public:
  UNIEP_DEVICE void operator()(uint32_t summands, const BFloat16* source, int32_t columns, BFloat16* out) const {
    constexpr int32_t kStep = ptx::kThreadsPerWarp * kVectorColumns;
    const int32_t first = static_cast<int32_t>(ptx::lane_index()) * kVectorColumns;
    for (int32_t begin = 0; begin < columns; begin += kStep * kVectors) {
      float sum[kVectors][kVectorColumns] = {};
      for (uint32_t left = summands; left != 0;) add_some(left, source, begin + first, columns, sum);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int32_t column = begin + first + v * kStep;
        if (column < columns) ptx::store_global_16(out + column, rounded(sum[v]));
      }
    }
  }

 private:
  // The next kLoads summands, all loads first.
  UNIEP_DEVICE static void add_some(uint32_t& left, const BFloat16* source, int32_t first, int32_t columns,
                                    float (&sum)[kVectors][kVectorColumns]) {
    constexpr int32_t kStep = ptx::kThreadsPerWarp * kVectorColumns;
    ptx::Vector16 values[kLoads][kVectors];
    uint32_t added = left;
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (left == 0) break;
      const auto* const row = reinterpret_cast<const BFloat16*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(source), __ffs(static_cast<int>(left)) - 1));
      left &= left - 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (first + v * kStep < columns) values[load][v] = ptx::load_global_16_once(row + first + v * kStep);
      }
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (added == 0) break;
      added &= added - 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) add_vector(sum[v], values[load][v]);
    }
  }
};

// A stage of the ring holds the same slice of all summands. What others have stored must have been fenced for bulk
// copies (ptx::fence_proxy_async_global()).
template <typename Ring>
class RingSum {
 public:
  static_assert(Ring::kChunkBytes >= kMostCudaSlots * kVectorBytes, "a stage holds 16 bytes of every summand");

  UNIEP_DEVICE explicit RingSum(Ring& ring) : ring_(ring) {}

  UNIEP_DEVICE void operator()(uint32_t summands, const BFloat16* source, int32_t columns, BFloat16* out) const {
    const uint32_t bytes = static_cast<uint32_t>(columns) * sizeof(BFloat16);
    const uint32_t slice = slice_bytes(summands);
    for (uint32_t offset = 0; offset < bytes; offset += slice) {
      if (ring_.has_no_stage()) add_slice(summands, slice, bytes, out);
      const uint32_t size = bytes - offset < slice ? bytes - offset : slice;
      ring_.load_pieces(summands, reinterpret_cast<const uint8_t*>(source) + offset, size, offset);
    }
    while (!ring_.is_empty()) add_slice(summands, slice, bytes, out);
  }

 private:
  // Whole 16-byte vectors for every lane, where that many fit.
  UNIEP_DEVICE static uint32_t slice_bytes(uint32_t summands) {
    constexpr uint32_t kWarpBytes = ptx::kThreadsPerWarp * kVectorBytes;
    const uint32_t count = summands == 0 ? 1 : static_cast<uint32_t>(__popc(summands));
    const uint32_t most = Ring::kChunkBytes / count;
    return most >= kWarpBytes ? most / kWarpBytes * kWarpBytes : most / kVectorBytes * kVectorBytes;
  }

  // Adds up the oldest slice.
  UNIEP_DEVICE void add_slice(uint32_t summands, uint32_t slice, uint32_t bytes, BFloat16* out) const {
    const auto chunk = ring_.landed();
    const uint32_t size = bytes - chunk.offset < slice ? bytes - chunk.offset : slice;
    const uint32_t end = chunk.address + static_cast<uint32_t>(__popc(summands)) * size;
    for (uint32_t at = ptx::lane_index() * kVectorBytes; at < size; at += ptx::kThreadsPerWarp * kVectorBytes) {
      float sum[kVectorColumns] = {};
      for (uint32_t address = chunk.address + at; address < end; address += size) {
        add_vector(sum, ptx::load_shared_16(address));
      }
      ptx::store_global_16(reinterpret_cast<uint8_t*>(out) + chunk.offset + at, rounded(sum));
    }
    ring_.release();
  }

  Ring& ring_;
};

}  // namespace uniep::cuda
