// The byte oracle: a GEMM that shares no role, no TMA, no MN-major operand and no epilogue with grouped_gemm.cu. One
// warpgroup computes 64 x 64 values as one chain of wgmma m64n64k16 from zeroed accumulators, on K-major operands that
// it gathers element by element. Writes fp32; the epilogues below are one thread an element.
#include "engine/cuda/device/arguments/gemm_config.h"
#include "engine/cuda/device/mainloop/wgmma.h"
#include "engine/cuda/device/ptx/memory.h"
#include "model/activation.h"

namespace uniep::cuda {

constexpr int kNaiveTile = 64;

struct NaiveArguments {
  const uint16_t* a;
  const uint16_t* const* b;  // wgrad: b[0] for all experts, else one address an expert
  float* d;                  // forward, dgrad: [rows, N]; wgrad: [experts][M, N]
  const int32_t* segment_start;
  const int32_t* row_count;
  int64_t a_row, a_k;  // strides of A in elements
  int64_t b_row, b_k;
  int32_t m, n, k;  // wgrad: M, N, unused
  int32_t is_wgrad;
};

// Grid: (n tiles, m tiles of the largest expert, experts).
extern "C" __global__ void __launch_bounds__(128) uniep_naive_gemm(NaiveArguments args) {
  __shared__ __align__(1024) uint16_t a_tile[kNaiveTile * 64];
  __shared__ __align__(1024) uint16_t b_tile[kNaiveTile * 64];
  const int expert = static_cast<int>(blockIdx.z);
  const int rows = args.row_count[expert];
  const int64_t segment = args.segment_start[expert];
  const int m_extent = args.is_wgrad != 0 ? args.m : rows;
  const int k_extent = args.is_wgrad != 0 ? rows : args.k;
  const int m0 = static_cast<int>(blockIdx.y) * kNaiveTile;
  const int n0 = static_cast<int>(blockIdx.x) * kNaiveTile;
  if (m0 >= m_extent) return;
  const uint16_t* const a = args.a + (args.is_wgrad != 0 ? segment * args.a_k : segment * args.a_row);
  const uint16_t* const b = args.is_wgrad != 0 ? args.b[0] + segment * args.b_k : args.b[expert];
  const int thread = static_cast<int>(threadIdx.x);
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = 0.0f;
  for (int k0 = 0; k0 < k_extent; k0 += 64) {
    for (int i = thread; i < kNaiveTile * 64; i += 128) {
      const int row = i / 64;
      const int k = i % 64;
      const bool k_exists = k0 + k < k_extent;
      const int at = row * 64 + (((k / 8) ^ (row % 8)) * 8 + k % 8);
      a_tile[at] = k_exists && m0 + row < m_extent ? a[(m0 + row) * args.a_row + (k0 + k) * args.a_k] : 0;
      b_tile[at] = k_exists && n0 + row < args.n ? b[(n0 + row) * args.b_row + (k0 + k) * args.b_k] : 0;
    }
    ptx::fence_proxy_async_shared();
    __syncthreads();
    wgmma_fence();
    const uint64_t a_operand = operand_descriptor<Major::kK>(ptx::shared_address(a_tile));
    const uint64_t b_operand = operand_descriptor<Major::kK>(ptx::shared_address(b_tile));
    // Steps of 16 that lie wholly past the end are left out here and multiplied as zeros in grouped_gemm.cu.
    const int steps = min(4, (k_extent - k0 + 15) / 16);
    for (int step = 0; step < steps; ++step) {
      Wgmma<64, Major::kK, Major::kK>::add(d, a_operand + step * kDescriptorStepK16<Major::kK>,
                                           b_operand + step * kDescriptorStepK16<Major::kK>);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(d);
    __syncthreads();
  }
  float* const out = args.d + (args.is_wgrad != 0 ? static_cast<int64_t>(expert) * args.m : segment) * args.n;
  const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int m = m0 + row + i / 2 % 2 * 8;
    const int n = n0 + i / 4 * 8 + thread % 4 * 2 + i % 2;
    if (m < m_extent && n < args.n) out[static_cast<int64_t>(m) * args.n + n] = d[i];
  }
}

// Forward, dgrad: rows that do not exist count as zero.
UNIEP_DEVICE bool row_exists(const int32_t* segment_start, const int32_t* row_count, int32_t experts, int64_t row) {
  for (int32_t e = 0; e < experts; ++e) {
    if (row >= segment_start[e] && row < segment_start[e] + row_count[e]) return true;
  }
  return false;
}

struct NaiveEpilogueArguments {
  const float* d;
  BFloat16* bf16;  // D rounded; swiglu: z; gradient: dz
  float* fp32;     // accumulate: += D
  BFloat16* activation;
  const BFloat16* saved;
  const float* prob;
  float* dprob;  // [rows]
  const int32_t* segment_start;
  const int32_t* row_count;
  int64_t rows;
  int32_t columns;  // of D
  int32_t experts;
  int32_t mask_rows;
  ActivationKind activation_kind;  // a gated one
  ActivationParameters parameters;
};

// Calls back with the expert's activation.
template <typename Call>
UNIEP_DEVICE void with_activation(const NaiveEpilogueArguments& args, Call&& call) {
  switch (args.activation_kind) {
    case ActivationKind::kGegluTanh:
      return call(ExpertActivation<ActivationKind::kGegluTanh>());
    case ActivationKind::kGegluErf:
      return call(ExpertActivation<ActivationKind::kGegluErf>());
    case ActivationKind::kShapedSwiglu:
      return call(ExpertActivation<ActivationKind::kShapedSwiglu>(args.parameters));
    default:
      return call(ExpertActivation<ActivationKind::kSwiglu>());
  }
}

extern "C" __global__ void uniep_naive_round(NaiveEpilogueArguments args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.rows * args.columns) return;
  const bool exists =
      args.mask_rows == 0 || row_exists(args.segment_start, args.row_count, args.experts, i / args.columns);
  const float value = exists ? args.d[i] : 0.0f;
  if (args.bf16 != nullptr) args.bf16[i] = to_bfloat16(value);
  if (args.fp32 != nullptr) args.fp32[i] = add(args.fp32[i], value);
}

extern "C" __global__ void uniep_naive_swiglu(NaiveEpilogueArguments args) {
  const int64_t width = args.columns / 2;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.rows * width) return;
  const int64_t row = i / width;
  const int64_t column = i % width;
  const int64_t gate_at = row * args.columns + column;
  const bool exists = row_exists(args.segment_start, args.row_count, args.experts, row);
  const BFloat16 gate = to_bfloat16(exists ? args.d[gate_at] : 0.0f);
  const BFloat16 up = to_bfloat16(exists ? args.d[gate_at + width] : 0.0f);
  args.bf16[gate_at] = gate;
  args.bf16[gate_at + width] = up;
  with_activation(args, [&](const auto& expert) {
    const float a = exists ? expert.activate(to_float(gate), to_float(up), args.prob[row]) : 0.0f;
    args.activation[i] = to_bfloat16(a);
  });
}

// One thread a row: dprob's chunks by their tree, then ascending.
extern "C" __global__ void uniep_naive_swiglu_gradient(NaiveEpilogueArguments args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.rows) return;
  const int64_t width = args.columns;
  const bool exists = row_exists(args.segment_start, args.row_count, args.experts, row);
  float dprob = 0.0f;
  for (int64_t chunk = 0; chunk < width; chunk += kProbColumns) {
    float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int64_t c = 0; c < kProbColumns && chunk + c < width; ++c) {
      const int64_t column = chunk + c;
      ActivationGradient g{};
      float da = 0.0f;
      if (exists) {
        const float gate = to_float(args.saved[row * 2 * width + column]);
        const float up = to_float(args.saved[row * 2 * width + width + column]);
        da = args.d[row * width + column];
        with_activation(args, [&](const auto& expert) { g = expert.gradient(gate, up, args.prob[row], da); });
      }
      args.activation[row * width + column] = to_bfloat16(g.activation);
      args.bf16[row * 2 * width + column] = to_bfloat16(g.gate);
      args.bf16[row * 2 * width + width + column] = to_bfloat16(g.up);
      float& p = partial[c % 8 / 2];
      p = add_prob_term(p, da, g.prob_term);
    }
    dprob = add(dprob, join_prob_partials(partial[0], partial[1], partial[2], partial[3]));
  }
  args.dprob[row] = dprob;
}

}  // namespace uniep::cuda
