#pragma once

#include "engine/cuda/device/arguments/rank_call.h"
#include "engine/cuda/device/ptx/bfloat16_pair.h"
#include "engine/cuda/device/transfer/copy_ring.h"

// A warp's sum of rows: in fp32, summands ascending from +0, rounded once. Lane i holds the begin of summand i, where
// bit i of `summands` is set; `columns` is a multiple of 8. Two ways that give the same bits: through registers, by
// warps that have many, and through a copy ring, by warps that have few. What was asked for is written on finish().
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
  UNIEP_DEVICE void finish() const {}

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

// A stage of the ring holds the same slice of all summands, and a note of what becomes of them, so that the slices of
// one sum are on their way while those of the sum before are added. What others have stored must have been fenced for
// bulk copies (ptx::fence_proxy_async_global()). A lane adds up to kVectors places of the row at a time.
template <typename Ring, int kVectors>
class RingSum {
 public:
  static_assert(Ring::kChunkBytes >= kMaxCudaSlots * kVectorBytes, "a stage holds 16 bytes of every summand");

  UNIEP_DEVICE explicit RingSum(Ring& ring) : ring_(ring) {}

  UNIEP_DEVICE void operator()(uint32_t summands, const BFloat16* source, int32_t columns, BFloat16* out) {
    const uint32_t bytes = static_cast<uint32_t>(columns) * sizeof(BFloat16);
    const uint32_t count = static_cast<uint32_t>(__popc(summands));
    const uint32_t slice = slice_bytes(count);
    for (uint32_t offset = 0; offset < bytes; offset += slice) {
      if (ring_.has_no_stage()) add_oldest();
      const uint32_t size = bytes - offset < slice ? bytes - offset : slice;
      const uint64_t target = reinterpret_cast<uint64_t>(out) + offset;
      ring_.load_pieces(summands, reinterpret_cast<const uint8_t*>(source) + offset, size,
                        {static_cast<uint32_t>(target), static_cast<uint32_t>(target >> 32), size, count});
    }
  }

  UNIEP_DEVICE void finish() {
    while (!ring_.is_empty()) add_oldest();
  }

 private:
  static constexpr uint32_t kWarpBytes = ptx::kThreadsPerWarp * kVectorBytes;

  // Whole 16-byte vectors for every lane, where that many fit.
  UNIEP_DEVICE static uint32_t slice_bytes(uint32_t count) {
    const uint32_t most = Ring::kChunkBytes / (count == 0 ? 1 : count);
    return most >= kWarpBytes ? most / kWarpBytes * kWarpBytes : most / kVectorBytes * kVectorBytes;
  }

  UNIEP_DEVICE void add_oldest() {
    const auto pieces = ring_.wait_for_pieces();
    const uint64_t target = pieces.note.word[0] | static_cast<uint64_t>(pieces.note.word[1]) << 32;
    const uint32_t size = pieces.note.word[2];
    const uint32_t end = pieces.address + pieces.note.word[3] * size;
    uint32_t at = ptx::lane_index() * kVectorBytes;
    for (; kVectors > 1 && at + (kVectors - 1) * kWarpBytes < size; at += kVectors * kWarpBytes) {
      add_vectors<kVectors>(pieces.address + at, end, size, target + at);
    }
    for (; at < size; at += kWarpBytes) add_vectors<1>(pieces.address + at, end, size, target + at);
    ring_.release_pieces();
  }

  // Of kCount places, a warp's width apart: first all loads of a summand, then its additions.
  template <int kCount>
  UNIEP_DEVICE static void add_vectors(uint32_t address, uint32_t end, uint32_t size, uint64_t target) {
    float sum[kCount][kVectorColumns] = {};
    for (; address < end; address += size) {
      ptx::Vector16 values[kCount];
#pragma unroll
      for (int v = 0; v < kCount; ++v) values[v] = ptx::load_shared_16(address + v * kWarpBytes);
#pragma unroll
      for (int v = 0; v < kCount; ++v) add_vector(sum[v], values[v]);
    }
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      ptx::store_global_16(reinterpret_cast<uint8_t*>(target) + v * kWarpBytes, rounded(sum[v]));
    }
  }

  Ring& ring_;
};

}  // namespace uniep::cuda
