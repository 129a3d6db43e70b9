#ifdef __x86_64__

#include <immintrin.h>

#include "engine/cpu/kernels_gemm.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_tables.h"

namespace uniep::cpu {

namespace {

struct Avx512Vector {
  static constexpr int kLanes = 16;
  static constexpr int kRows = 14;  // 28 sums, 2 of b and a broadcast in 32 registers
  static constexpr int kDepthStep = 32;
  using Register = __m512;

  static Register zero() { return _mm512_setzero_ps(); }
  static Register broadcast(float value) { return _mm512_set1_ps(value); }
  static Register load(const float* from) { return _mm512_load_ps(from); }
  static Register load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(mask(count), from); }
  static void store(float* to, Register value) { _mm512_store_ps(to, value); }
  static void store(float* to, Register value, int64_t count) { _mm512_mask_storeu_ps(to, mask(count), value); }
  static Register widen(const BFloat16* from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(shift_left_16(_mm512_maskz_cvtepu16_epi32(kAll, words)));
  }
  static Register fused_multiply_add(Register a, Register b, Register c) { return _mm512_fmadd_ps(a, b, c); }
  static Register canonical_nan(Register value) {
    const Register quiet_nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), quiet_nan);
  }

  // out[t * width + l] = rows[l][k + t] for t < kDepthStep: a 16 x 16 transposition of pairs of bf16, each pair then
  // split into its even (low half) and odd k.
  static void transpose(const BFloat16* const (&rows)[kLanes], int64_t k, float* out, int64_t width) {
    __m512i x[16], y[16];
    for (int l = 0; l < 16; ++l) x[l] = _mm512_loadu_si512(rows[l] + k);
    for (int l = 0; l < 16; l += 2) {
      y[l] = unpack_low_32(x[l], x[l + 1]);
      y[l + 1] = unpack_high_32(x[l], x[l + 1]);
    }
    // Now each 128-bit lane of x[4 g + d] holds rows 4 g .. 4 g + 3 of pair 4 lane + d.
    for (int l = 0; l < 16; l += 4) {
      x[l] = unpack_low_64(y[l], y[l + 2]);
      x[l + 1] = unpack_high_64(y[l], y[l + 2]);
      x[l + 2] = unpack_low_64(y[l + 1], y[l + 3]);
      x[l + 3] = unpack_high_64(y[l + 1], y[l + 3]);
    }
    for (int64_t d = 0; d < 4; ++d) {
      const __m512i even_low = shuffle_quarters<0x88>(x[d], x[4 + d]);  // lanes 0 and 2 of groups 0 and 1
      const __m512i odd_low = shuffle_quarters<0xdd>(x[d], x[4 + d]);
      const __m512i even_high = shuffle_quarters<0x88>(x[8 + d], x[12 + d]);
      const __m512i odd_high = shuffle_quarters<0xdd>(x[8 + d], x[12 + d]);
      store_pair(out + 2 * d * width, width, shuffle_quarters<0x88>(even_low, even_high));
      store_pair(out + (8 + 2 * d) * width, width, shuffle_quarters<0x88>(odd_low, odd_high));
      store_pair(out + (16 + 2 * d) * width, width, shuffle_quarters<0xdd>(even_low, even_high));
      store_pair(out + (24 + 2 * d) * width, width, shuffle_quarters<0xdd>(odd_low, odd_high));
    }
  }

  // Below -O2 GCC does not do this at the end of a function, and SSE code that follows would run many times slower.
  static void finish() { _mm256_zeroupper(); }

 private:
  // The zero-masking forms under a full mask are the plain instructions; the intrinsics without a mask make GCC 12 warn
  // of an uninitialised operand.
  static constexpr __mmask16 kAll = 0xffff;
  static __m512i shift_left_16(__m512i x) { return _mm512_maskz_slli_epi32(kAll, x, 16); }
  static __m512i unpack_low_32(__m512i x, __m512i y) { return _mm512_maskz_unpacklo_epi32(kAll, x, y); }
  static __m512i unpack_high_32(__m512i x, __m512i y) { return _mm512_maskz_unpackhi_epi32(kAll, x, y); }
  static __m512i unpack_low_64(__m512i x, __m512i y) { return _mm512_maskz_unpacklo_epi64(0xff, x, y); }
  static __m512i unpack_high_64(__m512i x, __m512i y) { return _mm512_maskz_unpackhi_epi64(0xff, x, y); }
  template <int kSelect>
  static __m512i shuffle_quarters(__m512i x, __m512i y) {
    return _mm512_maskz_shuffle_i32x4(kAll, x, y, kSelect);
  }

  static void store_pair(float* out, int64_t width, __m512i pairs) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    store(out, _mm512_castsi512_ps(shift_left_16(pairs)));
    store(out + width, _mm512_castsi512_ps(_mm512_and_si512(pairs, high_half)));
  }
  static __mmask16 mask(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }
};

}  // namespace

constinit const Kernels kAvx512Kernels = table_of(Gemm<Avx512Vector>::run);

}  // namespace uniep::cpu

#endif
