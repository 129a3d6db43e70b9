#include "cli/run_outputs.h"

#include <bit>
#include <span>

namespace uniep::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors hold little-endian values, written as they lie");

struct OutputTensor {
  io::TensorSpec spec;
  std::span<const std::byte> bytes;
};

OutputTensor tensor(const char* name, std::vector<int64_t> shape, const std::vector<BFloat16>& values) {
  return {{name, "BF16", std::move(shape)}, std::as_bytes(std::span(values))};
}
OutputTensor tensor(const char* name, std::vector<int64_t> shape, const std::vector<float>& values) {
  return {{name, "F32", std::move(shape)}, std::as_bytes(std::span(values))};
}

}  // namespace

void write_outputs(const std::string& path, const LayerConfig& config, const LayerResult& result, bool backward) {
  const LayerShape& shape = config.shape;
  const int64_t tokens = static_cast<int64_t>(result.y.size()) / shape.hidden;
  const int64_t rows = static_cast<int64_t>(result.z.size()) / (2 * shape.intermediate);
  std::vector<OutputTensor> tensors;
  tensors.push_back(tensor("y", {tokens, shape.hidden}, result.y));
  tensors.push_back(tensor("z", {rows, 2 * shape.intermediate}, result.z));
  if (backward) {
    const std::vector<int64_t> dw1 = {shape.experts, 2 * shape.intermediate, shape.hidden};
    const std::vector<int64_t> dw2 = {shape.experts, shape.hidden, shape.intermediate};
    const bool bf16 = config.numerics.weight_gradient == WeightGradient::kBFloat16;
    tensors.push_back(tensor("dx", {tokens, shape.hidden}, result.dx));
    tensors.push_back(tensor("dprobs", {tokens, shape.topk}, result.dprobs));
    tensors.push_back(bf16 ? tensor("dw1", dw1, result.dw1_bf16) : tensor("dw1", dw1, result.dw1_fp32));
    tensors.push_back(bf16 ? tensor("dw2", dw2, result.dw2_bf16) : tensor("dw2", dw2, result.dw2_fp32));
  }
  std::vector<io::TensorSpec> specs;
  for (const OutputTensor& each : tensors) specs.push_back(each.spec);
  io::SafetensorsWriter writer(path, specs);
  for (const OutputTensor& each : tensors) writer.append(each.bytes);
  writer.commit();
}

}  // namespace uniep::cli
