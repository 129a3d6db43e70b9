#pragma once

#include <cstdint>

#include "engine/cpu/kernels.h"
#include "model/elementwise.h"

// The GEMM, written once over a vector type and compiled once an instruction set. Everything has internal linkage: code
// that the compiler made for AVX-512 must never be linked into a program's common path.
//
// c is cut into tiles; of a tile k_block columns of both operands are widened to fp32 and packed into panels, A panels
// as [k][kLanes] of which kRows are used, B panels as [k][2 kLanes]; then a micro-kernel multiplies each pair of panels
// with all its sums in registers. One lane is one element of c, so no vector operation ever joins two steps of k.
namespace uniep::cpu {
namespace {

template <class V>
class Gemm {
 public:
  static void run(const GemmCall& call, GemmScratch& scratch) {
    const auto [a, b, m, n, k, k_block, c, ldc] = call;
    if (k == 0) {
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = 0.0f;
      }
      return;
    }
    const int64_t depth = smaller(k, k_block > 0 ? k_block : kDefaultDepth);
    for (int64_t i = 0; i < m; i += kTileRows) {
      for (int64_t j = 0; j < n; j += kTileColumns) {
        tile({a, b, m, n, k, depth, c + i * ldc + j, ldc}, {i, smaller(kTileRows, m - i), m},
             {j, smaller(kTileColumns, n - j), n}, scratch);
      }
    }
    V::finish();
  }

 private:
  using Register = typename V::Register;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kRows = V::kRows;
  static constexpr int kColumns = 2 * kLanes;
  static_assert(kRows <= kLanes, "an A panel is one vector wide");
  // A tile's panels of kDefaultDepth take 0.6 MiB at most: they stay in the second-level cache.
  static constexpr int64_t kTileRows = 256;
  static constexpr int64_t kTileColumns = 256;
  static constexpr int64_t kDefaultDepth = 256;

  // Rows of an operand: [begin, begin + count) of `extent` that may be read.
  struct Block {
    int64_t begin, count, extent;
  };

  static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

  // These rows and columns of a call, whose c is the tile's.
  static void tile(const GemmCall& call, Block rows, Block columns, GemmScratch& scratch) {
    const int64_t k = call.k, k_block = call.k_block;
    // Rows are shared out evenly: 64 rows at kRows = 14 are 4 panels of 13 and one of 12, not 4 of 14 and one of 8.
    const int64_t row_panels = (rows.count + kRows - 1) / kRows;
    const int64_t column_panels = (columns.count + kColumns - 1) / kColumns;
    const int64_t padded_depth = (k_block + V::kDepthStep - 1) / V::kDepthStep * V::kDepthStep;
    const int64_t row_panel_size = padded_depth * kLanes;
    const int64_t column_panel_size = padded_depth * kColumns;
    float* packed_a = scratch.reserve(row_panels * row_panel_size + column_panels * column_panel_size);
    float* packed_b = packed_a + row_panels * row_panel_size;

    for (int64_t k_begin = 0; k_begin < k; k_begin += k_block) {
      const int64_t depth = smaller(k_block, k - k_begin);
      for (int64_t p = 0; p < row_panels; ++p) {
        pack(call.a, {rows.begin + p * rows.count / row_panels, rows.extent, k_begin, depth},
             packed_a + p * row_panel_size, kLanes);
      }
      for (int64_t q = 0; q < column_panels; ++q) {
        float* panel = packed_b + q * column_panel_size;
        const int64_t begin = columns.begin + q * kColumns;
        pack(call.b, {begin, columns.extent, k_begin, depth}, panel, kColumns);
        pack(call.b, {begin + kLanes, columns.extent, k_begin, depth}, panel + kLanes, kColumns);
      }
      // A B panel stays in the first-level cache while the A panels stream by.
      for (int64_t q = 0; q < column_panels; ++q) {
        for (int64_t p = 0; p < row_panels; ++p) {
          const int64_t begin = p * rows.count / row_panels;
          const int64_t end = (p + 1) * rows.count / row_panels;
          multiply<kRows>(end - begin, {packed_a + p * row_panel_size, packed_b + q * column_panel_size, depth,
                                        call.c + begin * call.ldc + q * kColumns, call.ldc,
                                        columns.count - q * kColumns, k_begin > 0});
        }
      }
    }
  }

  // What a panel holds of an operand, of whose rows `extent` may be read.
  struct Part {
    int64_t begin, extent, k_begin, depth;
  };

  // Lane l of panel row k = operand (begin + l, k_begin + k) for k < depth. A panel may read on into its neighbour's
  // rows; lanes beyond the operand hold any number: no element of c comes from them.
  static void pack(const GemmOperand& operand, const Part& part, float* panel, int64_t panel_width) {
    if (operand.k_major) {
      pack_k_major(operand, part, panel, panel_width);
      return;
    }
    if (operand.rest != nullptr) {
      pack_parts(operand, part, panel, panel_width);
      return;
    }
    const auto [begin, extent, k_begin, depth] = part;
    const BFloat16* source = operand.data + k_begin * operand.stride + begin;
    if (begin + kLanes <= extent) {
      for (int64_t k = 0; k < depth; ++k) {
        V::store(panel + k * panel_width, V::widen(source + k * operand.stride));
      }
      return;
    }
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t l = 0; l < kLanes; ++l) {
        panel[k * panel_width + l] = begin + l < extent ? to_float(source[k * operand.stride + l]) : 0.0f;
      }
    }
  }

  // What lies before rest_begin, then the rest.
  static void pack_parts(const GemmOperand& operand, const Part& part, float* panel, int64_t panel_width) {
    const auto [begin, extent, k_begin, depth] = part;
    const int64_t left = operand.rest_begin - k_begin;
    const int64_t before = left < 0 ? 0 : smaller(left, depth);
    if (before > 0) {
      pack({operand.data, operand.stride, false}, {begin, extent, k_begin, before}, panel, panel_width);
    }
    if (before == depth) return;
    pack({operand.rest, operand.stride, false}, {begin, extent, k_begin + before - operand.rest_begin, depth - before},
         panel + before * panel_width, panel_width);
  }

  static void pack_k_major(const GemmOperand& operand, const Part& part, float* panel, int64_t panel_width) {
    const auto [begin, extent, k_begin, depth] = part;
    const BFloat16* rows[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) {
      rows[l] = operand.data + smaller(begin + l, extent - 1) * operand.stride + k_begin;
    }
    int64_t k = 0;
    for (; k + V::kDepthStep <= depth; k += V::kDepthStep) {
      V::transpose(rows, k, panel + k * panel_width, panel_width);
    }
    if (k == depth) return;
    BFloat16 tail[kLanes][V::kDepthStep] = {};
    for (int64_t l = 0; l < kLanes; ++l) {
      for (int64_t t = 0; t < depth - k; ++t) tail[l][t] = rows[l][k + t];
      rows[l] = tail[l];
    }
    V::transpose(rows, 0, panel + k * panel_width, panel_width);
  }

  // A pair of panels and the c that they make.
  struct PanelPair {
    const float* a;
    const float* b;
    int64_t depth;
    float* c;
    int64_t ldc;
    int64_t columns;
    bool carry_on;  // c holds the sums so far
  };

  // Picks the micro-kernel for `rows` <= Rows.
  template <int Rows>
  static void multiply(int64_t rows, const PanelPair& pair) {
    if constexpr (Rows > 1) {
      if (rows < Rows) {
        multiply<Rows - 1>(rows, pair);
        return;
      }
    }
    micro_kernel<Rows>(pair);
  }

  // c[Rows][columns] (+)= a panel * b panel; columns beyond kColumns belong to the next panel. Unrolled, so that `sum`
  // is registers and not an array in memory.
  template <int Rows>
  __attribute__((noinline)) static void micro_kernel(const PanelPair& pair) {
    const auto [a, b, depth, c, ldc, columns, carry_on] = pair;
    const int64_t low = smaller(columns, kLanes);
    const int64_t high = smaller(columns - low, kLanes);
    Register sum[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      sum[r][0] = carry_on ? V::load(c + r * ldc, low) : V::zero();
      sum[r][1] = carry_on ? V::load(c + r * ldc + kLanes, high) : V::zero();
    }
    for (int64_t k = 0; k < depth; ++k) {
      const Register b0 = V::load(b + k * kColumns);
      const Register b1 = V::load(b + k * kColumns + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Register x = V::broadcast(a[k * kLanes + r]);
        sum[r][0] = V::fused_multiply_add(x, b0, sum[r][0]);
        sum[r][1] = V::fused_multiply_add(x, b1, sum[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      V::store(c + r * ldc, V::canonical_nan(sum[r][0]), low);
      V::store(c + r * ldc + kLanes, V::canonical_nan(sum[r][1]), high);
    }
  }
};

}  // namespace
}  // namespace uniep::cpu
