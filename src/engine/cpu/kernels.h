#pragma once

#include <cstdint>
#include <memory>

#include "model/activation.h"

// The arithmetic of the CPU engine: one table of kernels an instruction set, chosen at run time. All tables give the
// same bits; the differences are speed only. A result that is NaN is the quiet NaN 0x7fc00000 (bf16: 0x7fc0), because
// which payload survives an operation on two NaNs is up to the instruction that a compiler picks; only round_row, which
// computes nothing, keeps payloads. Kernels keep no state and may run on any number of threads at once.
namespace uniep::cpu {

// Ascending: a CPU that has one has those before it.
enum class InstructionSet : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };  // kAvx2 means AVX2 and FMA

const char* instruction_set_name(InstructionSet set);
bool is_supported(InstructionSet set);

// The best that this CPU has, or the lower one that UNIEP_INSTRUCTION_SET = portable | avx2 | avx512 names. Throws
// Error: kInvalidArgument for another word, kUnsupported for a set that this CPU lacks.
InstructionSet best_instruction_set();

// A matrix that gemm multiplies: element (i, k) is k_major ? data[i * stride + k] : data[k * stride + i]. One that is
// not k_major may go on elsewhere: from k = rest_begin on element (i, k) is rest[(k - rest_begin) * stride + i].
struct GemmOperand {
  const BFloat16* data;
  int64_t stride;
  bool k_major;
  const BFloat16* rest = nullptr;
  int64_t rest_begin = 0;
};

// Packing buffers of gemm, grown on demand. One a thread.
class GemmScratch {
 public:
  // At least `count` floats on a 64-byte boundary; what they held before is lost. Throws Error(kOutOfMemory).
  float* reserve(int64_t count);

 private:
  struct Release {
    void operator()(float* memory) const;
  };
  std::unique_ptr<float, Release> memory_;
  int64_t count_ = 0;
};

// c[i * ldc + j] = sum over k of a(i, k) * b(j, k) for i < m, j < n: per element one fp32 chain from +0, k ascending, a
// fused multiply-add a step. Any m, n, k >= 0; k = 0 gives +0. k_block: the depth that is packed at once (0: the
// kernel's choice); the chain is carried on in c, so it changes no bit.
struct GemmCall {
  GemmOperand a, b;
  int64_t m, n, k;
  int64_t k_block = 0;
  float* c;
  int64_t ldc;
};

// n columns of a row of z. Not gated: up is not looked at.
struct ActivationRow {
  const BFloat16 *gate, *up;
  float prob;
  int64_t n;
};

// What the gradient of such a row reads and writes. Not gated: dup is not looked at.
struct ActivationRowGradient {
  const float* da;
  BFloat16 *a, *dgate, *dup;
  float* chunk_sums;
};

// The element-wise work between FC1 and FC2.
struct ActivationRows {
  // a[j] = bf16(activate(gate[j], up[j], prob)). a may be gate or up itself.
  void (*activate)(const ActivationParameters& parameters, const ActivationRow& row, BFloat16* a);

  // The gradient of it for da = d loss / d a: a (recomputed), dgate and dup, rounded to bf16, which may be gate and up
  // themselves; and chunk_sums[ceil(n / 64)], the fp32 sums of the dprob terms over 64 columns each, the last over what
  // is left. Inside a chunk four partial sums start at +0, partial q adds columns 8 j + 2 q and then 8 j + 2 q + 1 for
  // j ascending (missing columns are +0), and join_prob_partials joins them.
  void (*gradient)(const ActivationParameters& parameters, const ActivationRow& row,
                   const ActivationRowGradient& gradient);
};

struct Kernels {
  void (*gemm)(const GemmCall& call, GemmScratch& scratch);

  // out[j] = bf16(in[j]).
  void (*round_row)(const float* in, BFloat16* out, int64_t n);

  // out[j] = bf16(weight * bf16(in[j])).
  void (*weigh_row)(const float* in, float weight, BFloat16* out, int64_t n);

  // sums[j] = sums[j] + weight * in[j], rounded once.
  void (*add_weighted)(const BFloat16* in, float weight, float* sums, int64_t n);

  // By kind, and by whether the router's weight multiplies z.
  ActivationRows activations[kActivationKinds][2];

  // y[j] = bf16(sum over i of rows[i][j]): fp32, from +0, i ascending, rounded once. No row may overlap y.
  void (*sum_rows)(const BFloat16* const* rows, int64_t count, BFloat16* y, int64_t n);

  // main_grad[j] = main_grad[j] + c[j].
  void (*add_row)(const float* c, float* main_grad, int64_t n);
};

// Throws Error(kUnsupported) for a set that this CPU lacks.
const Kernels& kernels(InstructionSet set);

// Rounding to nearest even, subnormals kept: what the kernels need of the thread that calls them. A thread inherits the
// mode of the thread that created it (a framework may have set flush-to-zero), so a worker calls this when it starts.
void set_exact_arithmetic();

}  // namespace uniep::cpu
