#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "uniep/export.h"
#include "uniep/numerics.h"

// Grouped GEMMs over expert rows on a Hopper GPU: the three GEMMs of a mixture-of-experts layer's forward
// and backward, with the layer's element-wise work in their epilogues.
//
// All matrices are row-major bf16 in device memory unless said otherwise; addresses are multiples of 16 bytes and every
// width (K, N, H, I) is a multiple of 8. Work is ordered on the given stream and nothing is allocated or waited for.
// Every result is one chain of fp32 additions along K ascending, rounded once: the same bits whatever the tile shape,
// the number of SMs or the layout of the weights. All functions throw uniep::Error: kInvalidArgument for arguments that
// break a rule named here, kUnsupported where there is no Hopper GPU, driver or NVRTC, kDevice when a launch fails.
namespace uniep {

// Rows grouped by expert. Expert e owns rows segment_start[e] .. + row_count[e]; each segment starts at a multiple of
// 128 rows, segments ascend, and the rows up to the next multiple of 128 are padding that no other expert uses.
// Padding of an input to weight_gradient must be zero; every function here writes the padding of its outputs as zero.
struct ExpertRows {
  int experts = 0;                         // 1 to 65535
  int64_t rows = 0;                        // rows allocated, padding included; below 2^31
  const int32_t* segment_start = nullptr;  // device, [experts]
  const int32_t* row_count = nullptr;      // device, [experts]; may be 0; read when the kernel runs
};

// One matrix per expert: either one tensor [experts][rows][columns] at `base`, or an address for each expert.
// `addresses` is read during the call; the matrices are read when the kernel runs.
struct ExpertMatrices {
  const void* base = nullptr;
  std::vector<const void*> addresses;
};
struct MutableExpertMatrices {
  void* base = nullptr;
  std::vector<void*> addresses;
};

// How a GEMM is mapped onto the GPU. No field changes a bit of the result. 0 = the library's choice.
struct GemmTuning {
  int tile_n = 0;   // 128 or 256; input_gradient_swiglu: 128 or 192
  int stages = 0;   // 2 (input_gradient_swiglu: tile_n / 64) to 8, as shared memory allows
  int cluster = 0;  // CTAs that share a tile of the weights: 1 or 2
  int raster = 0;   // pairs of m tiles that run side by side
  int sms = 0;      // SMs to use
};

// What each function of GroupedGemm takes. Widths are multiples of 8 up to 4,194,240, and so many rows at most has a
// weight gradient. Streams are CUstream (cudaStream_t); null is the legacy default stream.

// out[rows, n] = x[rows, k] w[e][n, k]^T
struct ForwardGemm {
  ExpertRows rows;
  const void* x = nullptr;
  ExpertMatrices w{};
  void* out = nullptr;
  int n = 0, k = 0;
  void* stream = nullptr;
  GemmTuning tuning{};
};

// z[rows, 2 i] = x[rows, k] w1[e][2 i, k]^T (gate rows, then up rows), rounded; a[rows, i] = silu(z_gate) z_up prob.
struct ForwardSwigluGemm {
  ExpertRows rows;
  const void* x = nullptr;
  ExpertMatrices w1{};
  const float* prob = nullptr;  // fp32 [rows]
  void* z = nullptr;            // null: z is not written
  void* a = nullptr;
  int i = 0, k = 0;
  void* stream = nullptr;
  GemmTuning tuning{};
};

// dx[rows, n] = dy[rows, k] w[e][k, n]
struct InputGradientGemm {
  ExpertRows rows;
  const void* dy = nullptr;
  ExpertMatrices w{};
  void* dx = nullptr;
  int n = 0, k = 0;
  void* stream = nullptr;
  GemmTuning tuning{};
};

// da = dy[rows, k] w2[e][k, i], kept in fp32; from it and the saved z[rows, 2 i]: a[rows, i] again, dz[rows, 2 i] and
// dprob[rows].
struct InputGradientSwigluGemm {
  ExpertRows rows;
  const void* dy = nullptr;
  ExpertMatrices w2{};
  const void* z = nullptr;
  const float* prob = nullptr;  // fp32 [rows]
  void* a = nullptr;
  void* dz = nullptr;
  float* dprob = nullptr;     // fp32 [rows]
  void* workspace = nullptr;  // GroupedGemm::swiglu_gradient_workspace_bytes(rows.rows, i) bytes
  int i = 0, k = 0;
  void* stream = nullptr;
  GemmTuning tuning{};
};

// dw[e][m, n] = dy[rows of e, m]^T x[rows of e, n], summed along the expert's rows in their order.
struct WeightGradientGemm {
  ExpertRows rows;
  const void* dy = nullptr;
  const void* x = nullptr;
  MutableExpertMatrices dw{};
  int m = 0, n = 0;
  WeightGradient weight_gradient = WeightGradient::kBFloat16;  // kMainGrad leaves experts without rows as they are
  void* stream = nullptr;
  GemmTuning tuning{};
};

class UNIEP_API GroupedGemm {
 public:
  // `device`: CUDA ordinal. Its primary context is used, as PyTorch does.
  explicit GroupedGemm(int device);
  ~GroupedGemm();
  GroupedGemm(const GroupedGemm&) = delete;
  GroupedGemm& operator=(const GroupedGemm&) = delete;

  void forward(const ForwardGemm& gemm);
  void forward_swiglu(const ForwardSwigluGemm& gemm);
  void input_gradient(const InputGradientGemm& gemm);
  void input_gradient_swiglu(const InputGradientSwigluGemm& gemm);
  static int64_t swiglu_gradient_workspace_bytes(int64_t rows, int i);
  void weight_gradient(const WeightGradientGemm& gemm);

  // Compiles (or takes from the cache) all kernels that the functions above use with default tuning, in parallel.
  // Without it each is compiled at its first use. `per_expert_addresses`: weights come as addresses, of this many.
  void prepare(int per_expert_addresses = 0);

  int sms() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace uniep
