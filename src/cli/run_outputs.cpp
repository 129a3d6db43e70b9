#include "cli/run_outputs.h"

#include <bit>
#include <span>
#include <vector>

#include "model/activation_choice.h"

namespace uniep::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors hold little-endian values, written as they lie");

std::vector<io::TensorSpec> specs_of(const LayerConfig& config, int64_t tokens, int64_t rows, bool backward) {
  const LayerShape& shape = config.shape;
  std::vector<io::TensorSpec> specs = {{"y", "BF16", {tokens, shape.hidden}}};
  if (rows != kNoZ) specs.push_back({"z", "BF16", {rows, z_columns(shape, config.numerics)}});
  if (!backward) return specs;
  const bool bf16 = config.numerics.weight_gradient == WeightGradient::kBFloat16;
  specs.push_back({"dx", "BF16", {tokens, shape.hidden}});
  specs.push_back({"dprobs", "F32", {tokens, shape.topk}});
  specs.push_back({"dw1", bf16 ? "BF16" : "F32", {shape.experts, z_columns(shape, config.numerics), shape.hidden}});
  specs.push_back({"dw2", bf16 ? "BF16" : "F32", {shape.experts, shape.hidden, shape.intermediate}});
  if (!config.numerics.bias) return specs;
  specs.push_back({"db1", bf16 ? "BF16" : "F32", {shape.experts, z_columns(shape, config.numerics)}});
  specs.push_back({"db2", bf16 ? "BF16" : "F32", {shape.experts, shape.hidden}});
  return specs;
}

}  // namespace

OutputTensors::OutputTensors(const std::string& path, const LayerConfig& config, int64_t tokens, int64_t rows,
                             bool backward)
    : backward_(backward), writer_(path, specs_of(config, tokens, rows, backward)) {}

void OutputTensors::write(const LayerResult& result) {
  const auto append = [this](const auto& values) { writer_.append(std::as_bytes(std::span(values))); };
  append(result.y);
  append(result.z);
  if (backward_) {
    append(result.dx);
    append(result.dprobs);
    // One of each pair is empty, and both of biases where there are none.
    append(result.dw1_bf16);
    append(result.dw1_fp32);
    append(result.dw2_bf16);
    append(result.dw2_fp32);
    append(result.db1_bf16);
    append(result.db1_fp32);
    append(result.db2_bf16);
    append(result.db2_fp32);
  }
  writer_.commit();
}

}  // namespace uniep::cli
