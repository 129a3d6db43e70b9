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

// Forward, dgrad: the expert of a row, or -1: rows that do not exist count as zero.
UNIEP_DEVICE int32_t expert_of_row(const int32_t* segment_start, const int32_t* row_count, int32_t experts,
                                   int64_t row) {
  for (int32_t e = 0; e < experts; ++e) {
    if (row >= segment_start[e] && row < segment_start[e] + row_count[e]) return e;
  }
  return -1;
}

struct NaiveEpilogueArguments {
  const float* d;
  BFloat16* bf16;  // D rounded; activation: z; gradient: dz
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
  int32_t weighs_output;  // activation: prob is left out; round: D is weighed when it is rounded
  int32_t weighs_z;       // prob multiplies z
  ActivationKind activation_kind;
  ActivationParameters parameters;
  const BFloat16* bias;  // [experts][columns], added to D before it is rounded; gradient: b2 [experts][hidden]; or null
  const BFloat16* dyg;   // gradient with b2: [rows][hidden]
  int32_t hidden;
};

UNIEP_DEVICE int32_t expert_of_row(const NaiveEpilogueArguments& args, int64_t row) {
  return expert_of_row(args.segment_start, args.row_count, args.experts, row);
}

// Of D, with its bias.
UNIEP_DEVICE float biased(const NaiveEpilogueArguments& args, int64_t at, int32_t expert) {
  const float value = args.d[at];
  if (args.bias == nullptr) return value;
  return add(value, to_float(args.bias[int64_t{expert} * args.columns + at % args.columns]));
}

template <ActivationKind kKind, typename Call>
UNIEP_DEVICE void with_place(const NaiveEpilogueArguments& args, Call&& call) {
  if (args.weighs_z != 0) return call(ExpertActivation<kKind, true>(args.parameters));
  call(ExpertActivation<kKind>(args.parameters));
}

// Calls back with the expert's activation.
template <typename Call>
UNIEP_DEVICE void with_activation(const NaiveEpilogueArguments& args, Call&& call) {
  switch (args.activation_kind) {
    case ActivationKind::kGegluTanh:
      return with_place<ActivationKind::kGegluTanh>(args, call);
    case ActivationKind::kGegluErf:
      return with_place<ActivationKind::kGegluErf>(args, call);
    case ActivationKind::kRelu2:
      return with_place<ActivationKind::kRelu2>(args, call);
    case ActivationKind::kSilu:
      return with_place<ActivationKind::kSilu>(args, call);
    case ActivationKind::kShapedSwiglu:
      return with_place<ActivationKind::kShapedSwiglu>(args, call);
    default:
      return with_place<ActivationKind::kSwiglu>(args, call);
  }
}

extern "C" __global__ void uniep_naive_round(NaiveEpilogueArguments args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.rows * args.columns) return;
  const int64_t row = i / args.columns;
  const int32_t expert = args.mask_rows == 0 ? 0 : expert_of_row(args, row);
  float value = expert >= 0 ? biased(args, i, expert) : 0.0f;
  if (args.weighs_output != 0 && expert >= 0) value = mul(args.prob[row], to_float(to_bfloat16(value)));
  if (args.bf16 != nullptr) args.bf16[i] = to_bfloat16(value);
  if (args.fp32 != nullptr) args.fp32[i] = add(args.fp32[i], value);
}

extern "C" __global__ void uniep_naive_activation(NaiveEpilogueArguments args) {
  const bool gated = has_gate(args.activation_kind);
  const int64_t width = args.columns / (gated ? 2 : 1);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.rows * width) return;
  const int64_t row = i / width;
  const int64_t column = i % width;
  const int64_t gate_at = row * args.columns + column;
  const int32_t of = expert_of_row(args, row);
  const bool exists = of >= 0;
  const BFloat16 gate = to_bfloat16(exists ? biased(args, gate_at, of) : 0.0f);
  const BFloat16 up = to_bfloat16(exists && gated ? biased(args, gate_at + width, of) : 0.0f);
  const float prob = args.weighs_output != 0 ? 1.0f : args.prob[row];
  args.bf16[gate_at] = gate;
  if (gated) args.bf16[gate_at + width] = up;
  with_activation(args, [&](const auto& expert) {
    const float a = exists ? expert.activate(to_float(gate), to_float(up), prob) : 0.0f;
    args.activation[i] = to_bfloat16(a);
  });
}

// dy . b2 of 256 columns: 8 of each lane, then halves of the lanes.
UNIEP_DEVICE float naive_bias_dot(const NaiveEpilogueArguments& args, int64_t row, int32_t expert, int32_t first) {
  float lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    lanes[lane] = 0.0f;
    for (int column = first + 8 * lane; column < first + 8 * lane + 8 && column < args.hidden; ++column) {
      const float dy = to_float(args.dyg[row * args.hidden + column]);
      lanes[lane] = add(lanes[lane], mul(dy, to_float(args.bias[int64_t{expert} * args.hidden + column])));
    }
  }
  for (int half = 16; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = add(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// One thread a row: dprob's chunks by their tree, then ascending.
extern "C" __global__ void uniep_naive_activation_gradient(NaiveEpilogueArguments args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.rows) return;
  const bool gated = has_gate(args.activation_kind);
  const int64_t width = args.columns, of_z = gated ? 2 * width : width;
  const int32_t of = expert_of_row(args, row);
  const bool exists = of >= 0;
  float dprob = 0.0f;
  for (int64_t chunk = 0; chunk < width; chunk += kProbColumns) {
    float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int64_t c = 0; c < kProbColumns && chunk + c < width; ++c) {
      const int64_t column = chunk + c;
      ActivationGradient g{};
      if (exists) {
        const float gate = to_float(args.saved[row * of_z + column]);
        const float up = gated ? to_float(args.saved[row * of_z + width + column]) : 0.0f;
        const float da = args.d[row * width + column];
        with_activation(args, [&](const auto& expert) {
          g = expert.gradient(gate, up, args.prob[row], da);
          float& p = partial[c % 8 / 2];
          p = expert.add_prob(p, da, g.prob_term);
        });
      }
      args.activation[row * width + column] = to_bfloat16(g.activation);
      args.bf16[row * of_z + column] = to_bfloat16(g.gate);
      if (gated) args.bf16[row * of_z + width + column] = to_bfloat16(g.up);
    }
    dprob = add(dprob, join_prob_partials(partial[0], partial[1], partial[2], partial[3]));
  }
  for (int32_t column = 0; args.bias != nullptr && exists && column < args.hidden; column += 256) {
    dprob = add(dprob, naive_bias_dot(args, row, of, column));
  }
  args.dprob[row] = dprob;
}

struct NaiveBiasArguments {
  const BFloat16* values;  // [rows][columns]
  const float* prob;       // [rows], or null: 1
  float* sums;             // [experts][columns]
  const int32_t* segment_start;
  const int32_t* row_count;
  int32_t columns, experts;
};

// One thread a column of an expert: 128 rows at a time.
extern "C" __global__ void uniep_naive_bias_gradient(NaiveBiasArguments args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= int64_t{args.experts} * args.columns) return;
  const int64_t expert = i / args.columns, column = i % args.columns;
  float sum = 0.0f;
  for (int32_t begin = 0; begin < args.row_count[expert]; begin += 128) {
    float block = 0.0f;
    for (int32_t row = begin; row < begin + 128 && row < args.row_count[expert]; ++row) {
      const int64_t at = args.segment_start[expert] + row;
      const float prob = args.prob == nullptr ? 1.0f : args.prob[at];
      block = fused_multiply_add(prob, to_float(args.values[at * args.columns + column]), block);
    }
    sum = add(sum, block);
  }
  args.sums[i] = sum;
}

}  // namespace uniep::cuda
