#include "tests/cuda/layer_oracle.h"

#include <algorithm>

#include "api/place.h"
#include "tests/cuda/layer_oracle_arguments.h"
#include "tests/cuda/naive_arguments.h"

namespace uniep::cuda::test {
namespace {

constexpr const char* kNaive = "engine/cuda/device/naive_gemm.cu";
constexpr const char* kMovement = "layer_oracle_kernels.cu";
constexpr int kThreads = 256;

int blocks_of(int64_t elements) {
  return static_cast<int>((elements + kThreads - 1) / kThreads);
}

template <typename T>
Buffer uploaded(const std::vector<T>& values) {
  Buffer buffer(static_cast<int64_t>(values.size() * sizeof(T)));
  if (!values.empty()) buffer.upload(values);
  return buffer;
}

// Expert rows of a placement on one rank.
struct Rows {
  int experts;
  int64_t rows;
  int most;
  Buffer start, count;
};

Buffer multiply(Kernels& kernels, const Rows& rows, const Buffer& a, const Buffer& weights, int n, int k) {
  std::vector<const uint16_t*> addresses;
  for (int64_t e = 0; e < rows.experts; ++e) addresses.push_back(weights.as<uint16_t>() + e * n * k);
  const Buffer table = uploaded(addresses);
  Buffer d(rows.rows * n * 4);
  kernels.run(kNaive, "uniep_naive_gemm",
              {.grid_x = (n + 63) / 64, .grid_y = (rows.most + 63) / 64, .grid_z = rows.experts, .threads = 128},
              NaiveArguments{a.as<uint16_t>(), table.as<const uint16_t*>(), d.as<float>(), rows.start.as<int32_t>(),
                             rows.count.as<int32_t>(), k, 1, k, 1, 0, n, k, 0});
  check(driver().cuCtxSynchronize(), "naive GEMM");
  return d;
}

NaiveEpilogueArguments epilogue_of(const Rows& rows, const Buffer& d, int columns) {
  NaiveEpilogueArguments arguments;
  arguments.d = d.as<float>();
  arguments.segment_start = rows.start.as<int32_t>();
  arguments.row_count = rows.count.as<int32_t>();
  arguments.rows = rows.rows;
  arguments.columns = columns;
  arguments.experts = rows.experts;
  arguments.mask_rows = 1;
  return arguments;
}

}  // namespace

cli::LayerResult naive_layer(Kernels& kernels, const LayerConfig& config, const cli::LayerData& data) {
  const int hidden = static_cast<int>(config.shape.hidden), width = static_cast<int>(config.shape.intermediate);
  const int64_t tokens = data.all_tokens();
  const Routing routing{tokens, data.ids.data(), IndexType::kInt32, data.probs.data(), {}};
  const auto placed = place_on_host(config.shape, 1, std::span(&routing, 1), {});
  const internal::RankPlacement& own = placed->rank[0];

  cli::LayerResult result;
  result.y.assign(static_cast<std::size_t>(tokens * hidden), BFloat16{0});
  if (placed->rows[0] == 0) return result;
  const Rows rows{static_cast<int>(config.shape.experts), placed->padded_rows[0],
                  *std::max_element(placed->expert_rows.begin(), placed->expert_rows.end()),
                  uploaded(placed->segment_start), uploaded(placed->expert_rows)};
  std::vector<int32_t> token_of_row;
  std::vector<float> prob_of_row;
  for (const RowSource& source : own.rows) {
    token_of_row.push_back(source.token);
    prob_of_row.push_back(source.prob);
  }
  const Buffer x = uploaded(data.x), tokens_of_rows = uploaded(token_of_row), probs = uploaded(prob_of_row);
  const Buffer w1 = uploaded(data.w1), w2 = uploaded(data.w2);
  const Buffer xg(rows.rows * hidden * 2), z(rows.rows * 2 * width * 2), a(rows.rows * width * 2);
  const Buffer out(rows.rows * hidden * 2), y(tokens * hidden * 2);

  kernels.run(kMovement, "oracle_gather", {.grid_x = blocks_of(rows.rows * hidden), .threads = kThreads},
              OracleGatherArguments{x.as<BFloat16>(), tokens_of_rows.as<int>(), xg.as<BFloat16>(), rows.rows, hidden});
  {
    const Buffer d = multiply(kernels, rows, xg, w1, 2 * width, hidden);
    NaiveEpilogueArguments swiglu = epilogue_of(rows, d, 2 * width);
    swiglu.bf16 = z.as<BFloat16>();
    swiglu.activation = a.as<BFloat16>();
    swiglu.prob = probs.as<float>();
    kernels.run(kNaive, "uniep_naive_swiglu", {.grid_x = blocks_of(rows.rows * width), .threads = kThreads}, swiglu);
    check(driver().cuCtxSynchronize(), "naive FC1");
  }
  {
    const Buffer d = multiply(kernels, rows, a, w2, hidden, width);
    NaiveEpilogueArguments rounded = epilogue_of(rows, d, hidden);
    rounded.bf16 = out.as<BFloat16>();
    kernels.run(kNaive, "uniep_naive_round", {.grid_x = blocks_of(rows.rows * hidden), .threads = kThreads}, rounded);
    check(driver().cuCtxSynchronize(), "naive FC2");
  }
  const Buffer row_of_slot = uploaded(own.row_of_slot), expert_of_slot = uploaded(own.expert_of_slot);
  kernels.run(
      kMovement, "oracle_combine", {.grid_x = blocks_of(tokens * hidden), .threads = kThreads},
      OracleCombineArguments{out.as<BFloat16>(), row_of_slot.as<int>(), expert_of_slot.as<int>(), y.as<BFloat16>(),
                             tokens, hidden, static_cast<int>(config.shape.topk),
                             static_cast<int>(config.shape.experts), static_cast<int>(config.numerics.combine_groups)});
  result.y = y.download<BFloat16>(result.y.size());
  const std::vector<BFloat16> padded = z.download<BFloat16>(static_cast<std::size_t>(rows.rows * 2 * width));
  for (std::size_t expert = 0; expert < placed->expert_rows.size(); ++expert) {
    const auto first = padded.begin() + static_cast<std::ptrdiff_t>(placed->segment_start[expert]) * 2 * width;
    result.z.insert(result.z.end(), first,
                    first + static_cast<std::ptrdiff_t>(placed->expert_rows[expert]) * 2 * width);
  }
  return result;
}

}  // namespace uniep::cuda::test
