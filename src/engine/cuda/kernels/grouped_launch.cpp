#include "engine/cuda/kernels/grouped_launch.h"

#include <algorithm>

#include "engine/cuda/kernels/tensor_maps.h"

namespace uniep::cuda {
namespace {

constexpr int kMaxAddresses = 224;  // that table_capacity() has room for

void launch_part(KernelStore& kernels, const GemmConfig& config, const WeightGradientOperands& gemm,
                 const GemmPlace& place) {
  GemmArguments arguments = grouped_arguments(gemm.rows, gemm.n, 0);
  // Without rows no operand is read, but TMA wants a real address.
  const bool empty = gemm.rows.rows == 0;
  const int64_t map_rows = empty ? kTileM : gemm.rows.rows;
  const std::vector<void*>& addresses = gemm.dw.addresses;
  const void* const any = addresses.empty() ? gemm.dw.base : addresses[0];
  arguments.a =
      encode_operand_map({empty ? any : gemm.a, gemm.m, map_rows, 1, empty ? 0 : gemm.a_stride}, kTileK, "dy");
  const TensorMap b = encode_operand_map({empty ? any : gemm.b, gemm.n, map_rows, 1}, kTileK, "x");
  arguments.m_extent = gemm.m;
  arguments.raster = gemm.raster;
  arguments.output_per_expert = addresses.empty() ? 0 : 1;
  arguments.output_leading = gemm.n;
  arguments.output_expert_stride = static_cast<int64_t>(gemm.m) * gemm.n;
  arguments.failed = gemm.failed;
  GemmOperands operands{arguments, {b}, addresses.empty() ? std::vector{gemm.dw.base} : addresses};
  if (lends_stages(config)) {
    const int64_t matrices = addresses.empty() ? gemm.rows.experts : 1;
    for (const void* output : operands.outputs) {
      operands.maps.push_back(encode_gradient_map({output, gemm.n, gemm.m, matrices}, kTileM, "dw"));
    }
  }
  launch_grouped_gemm(kernels, config, operands, place);
}

}  // namespace

GemmArguments grouped_arguments(const ExpertRows& rows, int n, int k) {
  GemmArguments arguments{};
  arguments.segment_start = rows.segment_start;
  arguments.row_count = rows.row_count;
  arguments.experts = rows.experts;
  arguments.n_extent = n;
  arguments.k_extent = k;
  return arguments;
}

void launch_grouped_gemm(KernelStore& kernels, const GemmConfig& config, const GemmOperands& operands,
                         const GemmPlace& place) {
  const ArgumentBlock block = argument_block(config, operands.arguments, operands.maps, operands.outputs);
  const int shared_bytes = shared_memory_bytes(config);
  CUfunction function = kernels.get(gemm_request(config), shared_bytes);
  Launch shape;
  shape.grid_x = place.sms / config.cluster * config.cluster;
  shape.threads = kGemmThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = shared_bytes;
  shape.stream = place.stream;
  launch_kernel(function, shape, block.data(), "launching a grouped GEMM");
}

Epilogue epilogue_of(WeightGradient gradient) {
  switch (gradient) {
    case WeightGradient::kBFloat16:
      return Epilogue::kBFloat16;
    case WeightGradient::kFloat32:
      return Epilogue::kFloat32;
    default:
      return Epilogue::kAccumulate;
  }
}

int addresses_of_launch(int experts) {
  return table_capacity(std::min(experts, kMaxAddresses));
}

void launch_weight_gradient(KernelStore& kernels, GemmConfig config, const WeightGradientOperands& gemm,
                            const GemmPlace& place) {
  const int experts = gemm.rows.experts;
  if (gemm.rows.rows == 0 && config.epilogue == Epilogue::kAccumulate) return;
  const bool by_address = !gemm.dw.addresses.empty();
  config.outputs = addresses_of_launch(by_address ? experts : 0);
  if (!by_address) return launch_part(kernels, config, gemm, place);
  for (int first = 0; first < experts; first += kMaxAddresses) {
    WeightGradientOperands part = gemm;
    part.rows.experts = std::min(kMaxAddresses, experts - first);
    part.rows.segment_start += first;
    part.rows.row_count += first;
    const auto begin = gemm.dw.addresses.begin() + first;
    part.dw.addresses.assign(begin, begin + part.rows.experts);
    launch_part(kernels, config, part, place);
  }
}

}  // namespace uniep::cuda
