#pragma once

#include "engine/cuda/device/ptx/common.h"

// Shared-memory operands of wgmma, bf16, 128-byte swizzle, as TMA writes them.
namespace uniep::cuda {

// K-major: a row of the operand is 128 bytes (64 values of K), rows follow one another.
// MN-major: a box is 64 values of M or N wide (128 bytes) and 64 values of K deep; boxes follow one another.
enum class Major { kK, kMN };

constexpr uint32_t kSwizzleRowBytes = 128;
constexpr uint32_t kSwizzleAtomBytes = 8 * kSwizzleRowBytes;
constexpr uint32_t kBoxColumns = 64;  // bf16 values in a swizzled row
constexpr uint32_t kBoxBytes = 64 * kSwizzleRowBytes;

// The descriptor's fields, in units of 16 bytes. Stride: between groups of 8 rows (K-major: along M or N; MN-major:
// along K). Leading: between boxes of 64 along M or N (MN-major only).
template <Major kMajor>
UNIEP_DEVICE uint64_t operand_descriptor(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kStride = static_cast<uint64_t>(kSwizzleAtomBytes >> 4) << 32;
  constexpr uint64_t kLeading = static_cast<uint64_t>(kMajor == Major::kK ? 1 : kBoxBytes >> 4) << 16;
  return kSwizzle128 | kStride | kLeading | ((shared_address & 0x3ffffu) >> 4);
}

// What 16 values of K add to the descriptor: 32 bytes inside a swizzled row, or 16 rows.
template <Major kMajor>
constexpr uint32_t kDescriptorStepK16 = (kMajor == Major::kK ? 32 : 16 * kSwizzleRowBytes) >> 4;

}  // namespace uniep::cuda
