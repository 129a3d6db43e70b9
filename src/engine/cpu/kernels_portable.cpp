#include "engine/cpu/kernels_gemm.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_tables.h"

namespace uniep::cpu {

namespace {

// Any CPU: slow where the compiler has no fused multiply-add instruction and must call the C library's.
struct PortableVector {
  static constexpr int kLanes = 4;
  static constexpr int kRows = 4;
  static constexpr int kDepthStep = 1;
  struct Register {
    float lane[kLanes];
  };

  static Register zero() { return Register{}; }
  static Register broadcast(float value) { return Register{{value, value, value, value}}; }
  static Register load(const float* from, int64_t count = kLanes) {
    Register result = zero();
    for (int64_t l = 0; l < count; ++l) result.lane[l] = from[l];
    return result;
  }
  static void store(float* to, Register value, int64_t count = kLanes) {
    for (int64_t l = 0; l < count; ++l) to[l] = value.lane[l];
  }
  static Register widen(const BFloat16* from) {
    Register result;
    for (int l = 0; l < kLanes; ++l) result.lane[l] = to_float(from[l]);
    return result;
  }
  static Register fused_multiply_add(Register a, Register b, Register c) {
    for (int l = 0; l < kLanes; ++l) c.lane[l] = uniep::fused_multiply_add(a.lane[l], b.lane[l], c.lane[l]);
    return c;
  }
  static Register canonical_nan(Register value) {
    for (float& lane : value.lane) lane = cpu::canonical_nan(lane);
    return value;
  }
  // out[t * width + l] = rows[l][k + t] for t < kDepthStep.
  static void transpose(const BFloat16* const (&rows)[kLanes], int64_t k, float* out, int64_t) {
    for (int l = 0; l < kLanes; ++l) out[l] = to_float(rows[l][k]);
  }
  static void finish() {}
};

}  // namespace

constinit const Kernels kPortableKernels = table_of(Gemm<PortableVector>::run);

}  // namespace uniep::cpu
