#include "engine/cuda/kernels/grouped_launch.h"

#include <algorithm>

#include "engine/cuda/kernels/tensor_maps.h"

namespace uniep::cuda {
namespace {

constexpr int kMostAddresses = 224;  // that table_capacity() has room for

void launch_part(KernelStore& kernels, const GemmConfig& config, const WeightGradientProduct& product, int raster,
                 int sms, CUstream stream) {
  GemmArguments arguments = grouped_arguments(product.rows, product.n, 0);
  // Without rows no operand is read, but TMA wants a real address.
  const bool empty = product.rows.rows == 0;
  const int64_t map_rows = empty ? kTileM : product.rows.rows;
  const std::vector<void*>& addresses = product.dw.addresses;
  const void* const any = addresses.empty() ? product.dw.base : addresses[0];
  arguments.a =
      encode_operand_map({empty ? any : product.a, product.m, map_rows, 1, empty ? 0 : product.a_stride}, kTileK, "dy");
  const TensorMap b = encode_operand_map({empty ? any : product.b, product.n, map_rows, 1}, kTileK, "x");
  arguments.m_extent = product.m;
  arguments.raster = raster;
  arguments.output_per_expert = addresses.empty() ? 0 : 1;
  arguments.output_leading = product.n;
  arguments.output_expert_stride = static_cast<int64_t>(product.m) * product.n;
  arguments.failed = product.failed;
  std::vector<TensorMap> maps{b};
  const std::vector<void*> outputs = addresses.empty() ? std::vector{product.dw.base} : addresses;
  if (lends_stages(config)) {
    const int64_t matrices = addresses.empty() ? product.rows.experts : 1;
    for (const void* output : outputs) {
      maps.push_back(encode_gradient_map({output, product.n, product.m, matrices}, kTileM, "dw"));
    }
  }
  launch_grouped_gemm(kernels, config, arguments, maps, outputs, sms, stream);
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

void launch_grouped_gemm(KernelStore& kernels, const GemmConfig& config, const GemmArguments& arguments,
                         const std::vector<TensorMap>& maps, const std::vector<void*>& outputs, int sms,
                         CUstream stream) {
  const ArgumentBlock block = argument_block(config, arguments, maps, outputs);
  const int shared_bytes = shared_memory_bytes(config);
  CUfunction function = kernels.get(gemm_request(config), shared_bytes);
  Launch shape;
  shape.grid_x = sms / config.cluster * config.cluster;
  shape.threads = kGemmThreads;
  shape.cluster = config.cluster;
  shape.shared_bytes = shared_bytes;
  shape.stream = stream;
  launch_kernel(function, shape, block.data(), "launching a grouped GEMM");
}

Epilogue epilogue_of(WeightGradientMode mode) {
  switch (mode) {
    case WeightGradientMode::kBFloat16:
      return Epilogue::kBFloat16;
    case WeightGradientMode::kFloat32:
      return Epilogue::kFloat32;
    default:
      return Epilogue::kAccumulate;
  }
}

int addresses_of_launch(int experts) {
  return table_capacity(std::min(experts, kMostAddresses));
}

void launch_weight_gradient(KernelStore& kernels, GemmConfig config, const WeightGradientProduct& product, int raster,
                            int sms, CUstream stream) {
  const int experts = product.rows.experts;
  if (product.rows.rows == 0 && config.epilogue == Epilogue::kAccumulate) return;
  const bool by_address = !product.dw.addresses.empty();
  config.outputs = addresses_of_launch(by_address ? experts : 0);
  if (!by_address) return launch_part(kernels, config, product, raster, sms, stream);
  for (int first = 0; first < experts; first += kMostAddresses) {
    WeightGradientProduct part = product;
    part.rows.experts = std::min(kMostAddresses, experts - first);
    part.rows.segment_start += first;
    part.rows.row_count += first;
    const auto begin = product.dw.addresses.begin() + first;
    part.dw.addresses.assign(begin, begin + part.rows.experts);
    launch_part(kernels, config, part, raster, sms, stream);
  }
}

}  // namespace uniep::cuda
