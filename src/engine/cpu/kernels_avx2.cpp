#ifdef __x86_64__

#include <immintrin.h>

#include "engine/cpu/kernels_gemm.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_tables.h"

namespace uniep::cpu {

namespace {

struct Avx2Vector {
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;  // 12 sums, 2 of b and a broadcast in 16 registers
  static constexpr int kDepthStep = 16;
  using Register = __m256;

  static Register zero() { return _mm256_setzero_ps(); }
  static Register broadcast(const float& value) { return _mm256_broadcast_ss(&value); }
  static Register load(const float* from) { return _mm256_load_ps(from); }
  static Register load(const float* from, int64_t count) {
    return count == kLanes ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, mask(count));
  }
  static void store(float* to, Register value) { _mm256_store_ps(to, value); }
  static void store(float* to, Register value, int64_t count) {
    if (count == kLanes) {
      _mm256_storeu_ps(to, value);
    } else {
      _mm256_maskstore_ps(to, mask(count), value);
    }
  }
  static Register widen(const BFloat16* from) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  static Register fused_multiply_add(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
  static Register canonical_nan(Register value) {
    const Register quiet_nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(value, quiet_nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  }

  // out[t * width + l] = rows[l][k + t] for t < kDepthStep: an 8 x 8 transposition of pairs of bf16, each pair then
  // split into its even (low half) and odd k.
  static void transpose(const BFloat16* const (&rows)[kLanes], int64_t k, float* out, int64_t width) {
    __m256i x[8], y[8];
    for (int l = 0; l < 8; ++l) x[l] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[l] + k));
    for (int l = 0; l < 8; l += 2) {
      y[l] = _mm256_unpacklo_epi32(x[l], x[l + 1]);
      y[l + 1] = _mm256_unpackhi_epi32(x[l], x[l + 1]);
    }
    for (int l = 0; l < 8; l += 4) {
      x[l] = _mm256_unpacklo_epi64(y[l], y[l + 2]);
      x[l + 1] = _mm256_unpackhi_epi64(y[l], y[l + 2]);
      x[l + 2] = _mm256_unpacklo_epi64(y[l + 1], y[l + 3]);
      x[l + 3] = _mm256_unpackhi_epi64(y[l + 1], y[l + 3]);
    }
    for (int64_t p = 0; p < 4; ++p) {
      store_pair(out + 2 * p * width, width, _mm256_permute2x128_si256(x[p], x[p + 4], 0x20));
      store_pair(out + (2 * p + 8) * width, width, _mm256_permute2x128_si256(x[p], x[p + 4], 0x31));
    }
  }

  // Below -O2 GCC does not do this at the end of a function, and SSE code that follows would run many times slower.
  static void finish() { _mm256_zeroupper(); }

 private:
  static void store_pair(float* out, int64_t width, __m256i pairs) {
    const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    store(out, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
    store(out + width, _mm256_castsi256_ps(_mm256_and_si256(pairs, high_half)));
  }
  static __m256i mask(int64_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
  }
};

}  // namespace

constinit const Kernels kAvx2Kernels = table_of(Gemm<Avx2Vector>::run);

}  // namespace uniep::cpu

#endif
