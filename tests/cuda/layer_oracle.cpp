#include "tests/cuda/layer_oracle.h"

#include <algorithm>
#include <memory>

#include "model/activation_choice.h"
#include "model/place.h"
#include "tests/cuda/layer_oracle_arguments.h"
#include "tests/cuda/naive_arguments.h"

namespace uniep::cuda::test {
namespace {

constexpr const char* kNaive = "engine/cuda/device/kernels/naive_gemm.cu";
constexpr const char* kMovement = "layer_oracle_kernels.cu";
constexpr int kThreads = 256;
constexpr int kNaiveTile = 64;

int blocks_of(int64_t elements) {
  return static_cast<int>((elements + kThreads - 1) / kThreads);
}

int naive_tiles(int elements) {
  return (elements + kNaiveTile - 1) / kNaiveTile;
}

template <typename T>
Buffer uploaded(const std::vector<T>& values) {
  Buffer buffer(static_cast<int64_t>(values.size() * sizeof(T)));
  if (!values.empty()) buffer.upload(values);
  return buffer;
}

// A matrix an expert or of rows: where it begins and how far apart its elements are.
struct Operand {
  const Buffer& values;
  int64_t row, k;         // strides: of the product's rows or columns, and along the sum
  int64_t of_expert = 0;  // elements of an expert's matrix
};

class NaiveLayer {
 public:
  NaiveLayer(Kernels& kernels, const LayerConfig& config, const cli::LayerData& data)
      : kernels_(kernels),
        config_(config),
        data_(data),
        hidden_(static_cast<int>(config.shape.hidden)),
        width_(static_cast<int>(config.shape.intermediate)),
        of_z_(static_cast<int>(z_columns(config.shape, config.numerics))),
        experts_(static_cast<int>(config.shape.experts)),
        tokens_(data.all_tokens()) {
    const Routing routing{tokens_, data.ids.data(), IndexType::kInt32, data.probs.data(), {}};
    placed_ = place_on_host(config.shape, 1, std::span(&routing, 1), {});
    rows_ = placed_->padded_rows[0];
    most_ = *std::max_element(placed_->expert_rows.begin(), placed_->expert_rows.end());
    start_ = uploaded(placed_->segment_start);
    count_ = uploaded(placed_->expert_rows);
    std::vector<int32_t> token_of_row;
    std::vector<float> prob_of_row;
    for (const RowSource& source : placed_->rank[0].rows) {
      token_of_row.push_back(source.token);
      prob_of_row.push_back(source.prob);
    }
    token_of_row_ = uploaded(token_of_row);
    prob_ = uploaded(prob_of_row);
    row_of_slot_ = uploaded(placed_->rank[0].row_of_slot);
    expert_of_slot_ = uploaded(placed_->rank[0].expert_of_slot);
    if (has_rows()) w1_ = uploaded(data.w1);
    if (has_rows()) w2_ = uploaded(data.w2);
    if (config.numerics.bias) b1_ = uploaded(data.b1);
    if (config.numerics.bias) b2_ = uploaded(data.b2);
  }

  void forward(cli::LayerResult& result) {
    result.y.assign(static_cast<std::size_t>(tokens_ * hidden_), BFloat16{0});
    if (!has_rows()) return;
    xg_ = gathered(data_.x);
    z_ = Buffer(rows_ * of_z_ * 2);
    const Buffer a(rows_ * width_ * 2);
    {
      const int64_t of_expert = int64_t{of_z_} * hidden_;
      const Buffer d = multiply({xg_, hidden_, 1}, {w1_, hidden_, 1, of_expert}, of_z_, hidden_);
      NaiveEpilogueArguments activation = epilogue(d, of_z_);
      activation.bf16 = z_.as<BFloat16>();
      activation.activation = a.as<BFloat16>();
      activation.prob = prob_.as<float>();
      activation.weighs_output = weighs_output() ? 1 : 0;
      if (has_bias()) activation.bias = b1_.as<BFloat16>();
      element_wise("uniep_naive_activation", rows_ * width_, activation);
    }
    const Buffer d = multiply({a, width_, 1}, {w2_, width_, 1, int64_t{hidden_} * width_}, hidden_, width_);
    NaiveEpilogueArguments output = epilogue(d, hidden_);
    output.prob = prob_.as<float>();
    output.weighs_output = weighs_output() ? 1 : 0;
    if (has_bias()) output.bias = b2_.as<BFloat16>();
    result.y = combined(rounded(output));
    const std::vector<BFloat16> padded = z_.download<BFloat16>(static_cast<std::size_t>(rows_ * of_z_));
    for (std::size_t expert = 0; expert < placed_->expert_rows.size(); ++expert) {
      const auto first = padded.begin() + static_cast<std::ptrdiff_t>(placed_->segment_start[expert]) * of_z_;
      result.z.insert(result.z.end(), first, first + static_cast<std::ptrdiff_t>(placed_->expert_rows[expert]) * of_z_);
    }
  }

  // After forward().
  void backward(cli::LayerResult& result, float (*main_grad)(uint64_t index)) {
    result.dx.assign(static_cast<std::size_t>(tokens_ * hidden_), BFloat16{0});
    result.dprobs.assign(data_.ids.size(), 0.0f);
    const Buffer dyg = gathered(data_.dy), a(rows_ * width_ * 2), dz(rows_ * of_z_ * 2);
    if (has_rows()) {
      const Buffer da = multiply({dyg, hidden_, 1}, {w2_, 1, width_, int64_t{hidden_} * width_}, width_, hidden_);
      const Buffer dprob(rows_ * 4);
      NaiveEpilogueArguments gradient = epilogue(da, width_);
      gradient.bf16 = dz.as<BFloat16>();
      gradient.activation = a.as<BFloat16>();
      gradient.saved = z_.as<BFloat16>();
      gradient.prob = prob_.as<float>();
      gradient.dprob = dprob.as<float>();
      if (has_bias() && weighs_output()) {
        gradient.bias = b2_.as<BFloat16>();
        gradient.dyg = dyg.as<BFloat16>();
        gradient.hidden = hidden_;
      }
      element_wise("uniep_naive_activation_gradient", rows_, gradient);
      const std::vector<float> of_row = dprob.download<float>(static_cast<std::size_t>(rows_));
      for (std::size_t slot = 0; slot < result.dprobs.size(); ++slot) {
        const int32_t row = placed_->rank[0].row_of_slot[slot];
        if (row >= 0) result.dprobs[slot] = of_row[static_cast<std::size_t>(row)];
      }
    }
    add_gradient({dyg, 1, hidden_}, {a, 1, width_}, hidden_, width_, main_grad, result.dw2_bf16, result.dw2_fp32);
    add_gradient({dz, 1, of_z_}, {xg_, 1, hidden_}, of_z_, hidden_, main_grad, result.dw1_bf16, result.dw1_fp32);
    if (has_bias()) {
      add_bias_gradient(dyg, hidden_, weighs_output(), main_grad, result.db2_bf16, result.db2_fp32);
      add_bias_gradient(dz, of_z_, false, main_grad, result.db1_bf16, result.db1_fp32);
    }
    if (!has_rows()) return;
    const Operand w1{w1_, 1, hidden_, int64_t{of_z_} * hidden_};
    const Buffer dxg = multiply({dz, of_z_, 1}, w1, hidden_, of_z_);
    result.dx = combined(rounded(epilogue(dxg, hidden_)));
  }

 private:
  bool has_rows() const { return most_ > 0; }
  bool has_bias() const { return config_.numerics.bias; }
  bool weighs_output() const { return config_.numerics.router_weight == RouterWeight::kOutput; }

  // A token's row on every row that it has, padding zero.
  Buffer gathered(const std::vector<BFloat16>& values) {
    Buffer rows(rows_ * hidden_ * 2);
    if (!has_rows()) return rows;
    const Buffer of_tokens = uploaded(values);
    kernels_.run(
        kMovement, "oracle_gather", {.grid_x = blocks_of(rows_ * hidden_), .threads = kThreads},
        OracleGatherArguments{of_tokens.as<BFloat16>(), token_of_row_.as<int>(), rows.as<BFloat16>(), rows_, hidden_});
    check(driver().cuCtxSynchronize(), "gathering rows");
    return rows;
  }

  // [rows, n] in fp32, sums of k.
  Buffer multiply(const Operand& a, const Operand& b, int n, int k) {
    std::vector<const uint16_t*> addresses;
    for (int64_t e = 0; e < experts_; ++e) addresses.push_back(b.values.as<uint16_t>() + e * b.of_expert);
    const Buffer table = uploaded(addresses);
    Buffer d(rows_ * n * 4);
    kernels_.run(kNaive, "uniep_naive_gemm",
                 {.grid_x = naive_tiles(n), .grid_y = naive_tiles(most_), .grid_z = experts_, .threads = 128},
                 NaiveArguments{a.values.as<uint16_t>(), table.as<const uint16_t*>(), d.as<float>(),
                                start_.as<int32_t>(), count_.as<int32_t>(), a.row, a.k, b.row, b.k, 0, n, k, 0});
    check(driver().cuCtxSynchronize(), "naive GEMM");
    return d;
  }

  // A weight gradient [experts, m, n] of two matrices of rows, stored as Numerics say. Expert by expert: in fp32 all of
  // them may be more than there is memory.
  void add_gradient(const Operand& a, const Operand& b, int m, int n, float (*main_grad)(uint64_t index),
                    std::vector<BFloat16>& bf16, std::vector<float>& fp32) {
    const auto elements = static_cast<std::size_t>(m) * static_cast<std::size_t>(n);
    const Buffer d(static_cast<int64_t>(elements) * 4);
    for (int expert = 0; expert < experts_; ++expert) {
      const int32_t rows = placed_->expert_rows[static_cast<std::size_t>(expert)];
      std::vector<float> sums(elements, 0.0f);
      if (rows > 0) {
        const std::vector<const uint16_t*> second{b.values.as<uint16_t>()};
        const Buffer table = uploaded(second);
        kernels_.run(kNaive, "uniep_naive_gemm",
                     {.grid_x = naive_tiles(n), .grid_y = naive_tiles(m), .grid_z = 1, .threads = 128},
                     NaiveArguments{a.values.as<uint16_t>(), table.as<const uint16_t*>(), d.as<float>(),
                                    start_.as<int32_t>() + expert, count_.as<int32_t>() + expert, a.row, a.k, b.row,
                                    b.k, m, n, 0, 1});
        check(driver().cuCtxSynchronize(), "naive weight gradient");
        sums = d.download<float>(elements);
      }
      store_gradient(sums, rows > 0, main_grad, bf16, fp32);
    }
  }

  // Of the next expert.
  void store_gradient(const std::vector<float>& sums, bool has_rows, float (*main_grad)(uint64_t index),
                      std::vector<BFloat16>& bf16, std::vector<float>& fp32) const {
    const WeightGradient mode = config_.numerics.weight_gradient;
    for (const float sum : sums) {
      if (mode == WeightGradient::kBFloat16) {
        bf16.push_back(to_bfloat16(sum));
      } else if (mode == WeightGradient::kFloat32) {
        fp32.push_back(sum);
      } else {
        const float before = main_grad(fp32.size());
        fp32.push_back(has_rows ? add(before, sum) : before);
      }
    }
  }

  void add_bias_gradient(const Buffer& values, int columns, bool weighs, float (*main_grad)(uint64_t index),
                         std::vector<BFloat16>& bf16, std::vector<float>& fp32) {
    const auto count = static_cast<std::size_t>(columns);
    const Buffer sums(int64_t{experts_} * columns * 4);
    kernels_.run(kNaive, "uniep_naive_bias_gradient",
                 {.grid_x = blocks_of(int64_t{experts_} * columns), .threads = kThreads},
                 NaiveBiasArguments{values.as<BFloat16>(), weighs ? prob_.as<float>() : nullptr, sums.as<float>(),
                                    start_.as<int32_t>(), count_.as<int32_t>(), columns, experts_});
    check(driver().cuCtxSynchronize(), "naive gradient of a bias");
    const std::vector<float> all = sums.download<float>(static_cast<std::size_t>(experts_) * count);
    for (std::size_t expert = 0; expert < placed_->expert_rows.size(); ++expert) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(expert * count);
      const bool has_rows = placed_->expert_rows[expert] > 0;
      store_gradient({first, first + static_cast<std::ptrdiff_t>(count)}, has_rows, main_grad, bf16, fp32);
    }
  }

  NaiveEpilogueArguments epilogue(const Buffer& d, int columns) const {
    NaiveEpilogueArguments arguments;
    arguments.d = d.as<float>();
    arguments.segment_start = start_.as<int32_t>();
    arguments.row_count = count_.as<int32_t>();
    arguments.rows = rows_;
    arguments.columns = columns;
    arguments.experts = experts_;
    arguments.mask_rows = 1;
    arguments.activation_kind = activation_kind(config_.numerics);
    arguments.weighs_z = config_.numerics.router_weight == RouterWeight::kInput ? 1 : 0;
    arguments.parameters = activation_parameters(config_.numerics);
    return arguments;
  }

  void element_wise(const char* function, int64_t threads, const NaiveEpilogueArguments& arguments) {
    kernels_.run(kNaive, function, {.grid_x = blocks_of(threads), .threads = kThreads}, arguments);
    check(driver().cuCtxSynchronize(), function);
  }

  // [rows, hidden] in bf16.
  Buffer rounded(NaiveEpilogueArguments arguments) {
    Buffer out(rows_ * hidden_ * 2);
    arguments.bf16 = out.as<BFloat16>();
    element_wise("uniep_naive_round", rows_ * hidden_, arguments);
    return out;
  }

  // [tokens, hidden] of the rows.
  std::vector<BFloat16> combined(const Buffer& rows) {
    const Buffer sums(tokens_ * hidden_ * 2);
    kernels_.run(kMovement, "oracle_combine", {.grid_x = blocks_of(tokens_ * hidden_), .threads = kThreads},
                 OracleCombineArguments{rows.as<BFloat16>(), row_of_slot_.as<int>(), expert_of_slot_.as<int>(),
                                        sums.as<BFloat16>(), tokens_, hidden_, static_cast<int>(config_.shape.topk),
                                        experts_, static_cast<int>(config_.numerics.combine_groups)});
    check(driver().cuCtxSynchronize(), "combining rows");
    return sums.download<BFloat16>(static_cast<std::size_t>(tokens_ * hidden_));
  }

  Kernels& kernels_;
  const LayerConfig& config_;
  const cli::LayerData& data_;
  int hidden_, width_, of_z_, experts_;  // of_z_: columns of z
  int64_t tokens_;
  std::shared_ptr<const internal::PlacementState> placed_;
  int64_t rows_ = 0;
  int most_ = 0;  // rows of an expert
  Buffer start_, count_, token_of_row_, prob_, row_of_slot_, expert_of_slot_;
  Buffer w1_, w2_, b1_, b2_, xg_, z_;
};

}  // namespace

cli::LayerResult naive_layer(Kernels& kernels, const LayerConfig& config, const cli::LayerData& data,
                             float (*main_grad)(uint64_t index)) {
  cli::LayerResult result;
  NaiveLayer layer(kernels, config, data);
  layer.forward(result);
  if (main_grad != nullptr) layer.backward(result, main_grad);
  return result;
}

std::vector<KernelRequest> oracle_kernels(const std::string& folder) {
  std::vector<KernelRequest> requests;
  for (const char* const function : {"uniep_naive_gemm", "uniep_naive_round", "uniep_naive_activation",
                                     "uniep_naive_activation_gradient", "uniep_naive_bias_gradient"}) {
    requests.push_back(Kernels::request(folder, kNaive, function));
  }
  for (const char* const function : {"oracle_gather", "oracle_combine"}) {
    requests.push_back(Kernels::request(folder, kMovement, function));
  }
  return requests;
}

}  // namespace uniep::cuda::test
