#include "uniep/grouped_gemm.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "engine/cuda/device/arguments/prob_sum_arguments.h"
#include "engine/cuda/kernels/grouped_launch.h"
#include "engine/cuda/kernels/tensor_maps.h"
#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using namespace cuda;

void require(bool holds, const std::string& message) {
  if (!holds) throw Error(Status::kInvalidArgument, message);
}

// A task's K blocks and column tiles, which are at least 64 wide, are 16-bit numbers.
constexpr int kMostColumns = UINT16_MAX * 64;
static_assert(kTileK == 64, "a K block is as wide as the narrowest column tile");

void require_width(const char* name, int value) {
  require(value > 0 && value % 8 == 0 && value <= kMostColumns, std::string(name) + " is " + std::to_string(value) +
                                                                    ": it must be a positive multiple of 8 up to " +
                                                                    std::to_string(kMostColumns));
}

void require_address(const char* name, const void* address) {
  require(address != nullptr && reinterpret_cast<uintptr_t>(address) % 16 == 0,
          std::string(name) + " must be a device address that is a multiple of 16");
}

void require_rows(const ExpertRows& rows) {
  require(rows.experts >= 1 && rows.experts <= 65535,
          "rows.experts is " + std::to_string(rows.experts) + ": it must be 1 to 65535");
  require(rows.rows >= 0 && rows.rows % kTileM == 0 && rows.rows < (int64_t{1} << 31),
          "rows.rows is " + std::to_string(rows.rows) + ": it must be a multiple of 128 below 2^31");
  require(rows.segment_start != nullptr && rows.row_count != nullptr,
          "rows.segment_start and rows.row_count must be device addresses");
}

template <typename Matrices>
void require_matrices(const char* name, const Matrices& matrices, int experts) {
  if (matrices.addresses.empty()) {
    require_address(name, matrices.base);
    return;
  }
  require(static_cast<int>(matrices.addresses.size()) == experts,
          std::string(name) + " has " + std::to_string(matrices.addresses.size()) + " addresses for " +
              std::to_string(experts) + " experts");
}

// Bands of fewer pairs end together more often, so that what they share is read from memory once; but each reads all
// weights. (Measured: docs/performance.md.)
int default_raster(const GemmConfig& config, int n_extent) {
  const int n_blocks = (n_extent + config.tile_n - 1) / config.tile_n;
  return config.epilogue == Epilogue::kSwigluGradient && n_blocks <= 8 ? 4 : 8;
}

// Of all objects, so that each kernel is loaded once. None goes: launches hold no lock against that.
KernelStore& kernels_of(int device) {
  static std::mutex mutex;
  static auto* const stores = new std::map<int, KernelStore>;  // contexts may be gone before a static ends
  const std::lock_guard lock(mutex);
  return stores->try_emplace(device, device).first->second;
}

}  // namespace

struct GroupedGemm::State {
  explicit State(int device_index) : device(device_index), kernels(kernels_of(device_index)) {}

  int device;
  int sms = 0;
  KernelStore& kernels;

  GemmConfig configure(Layout layout, Epilogue epilogue, size_t maps, size_t outputs, const GemmTuning& tuning) const {
    GemmConfig config = default_config(layout, epilogue);
    if (tuning.tile_n != 0) config.tile_n = tuning.tile_n;
    if (tuning.cluster != 0) config.cluster = tuning.cluster;
    config.pipeline_stages = tuning.stages != 0 ? tuning.stages : largest_stages(config);
    config.maps = table_capacity(static_cast<int>(maps));
    config.outputs = table_capacity(static_cast<int>(outputs));
    require_legal(config);
    return config;
  }

  void start(const GemmConfig& config, GemmOperands operands, const GemmTuning& tuning, void* stream) {
    operands.arguments.raster = raster(config, operands.arguments.n_extent, tuning);
    launch_grouped_gemm(kernels, config, operands, {available(config, tuning), static_cast<CUstream>(stream)});
  }

  // dprob of a row: the sum of its chunks.
  void sum_probs(const InputGradientSwigluGemm& gemm) {
    const int64_t rows = gemm.rows.rows;
    const int32_t chunks = (gemm.i + kProbColumns - 1) / kProbColumns;
    ProbSumArguments sum{static_cast<float*>(gemm.workspace), rows, rows, gemm.dprob, chunks};
    Launch shape;
    shape.threads = 128;
    shape.grid_x = static_cast<int>((rows + shape.threads - 1) / shape.threads);
    shape.stream = static_cast<CUstream>(gemm.stream);
    launch_kernel(kernels.get(prob_sum_request(), 0), shape, &sum, "launching dprob's sum");
  }

  static int raster(const GemmConfig& config, int n_extent, const GemmTuning& tuning) {
    const int raster = tuning.raster != 0 ? tuning.raster : default_raster(config, n_extent);
    require(raster > 0, "tuning.raster must be positive");
    constexpr int kMost = 4096;  // times the column tiles it must be an int
    return std::min(raster, kMost);
  }

  int available(const GemmConfig& config, const GemmTuning& tuning) const {
    const int available = tuning.sms != 0 ? tuning.sms : sms;
    require(available >= config.cluster && available <= sms, "tuning.sms is " + std::to_string(tuning.sms) +
                                                                 ": it must be " + std::to_string(config.cluster) +
                                                                 " to " + std::to_string(sms));
    return available;
  }

  // B of forward and dgrad: [experts][matrix_rows][columns], as one tensor or as addresses.
  static std::vector<TensorMap> weight_maps(const ExpertMatrices& w, int experts, int matrix_rows, int columns,
                                            int box_rows) {
    std::vector<TensorMap> maps;
    if (w.addresses.empty()) {
      maps.push_back(encode_operand_map({w.base, columns, matrix_rows, experts}, box_rows, "weights"));
    }
    for (const void* address : w.addresses) {
      maps.push_back(encode_operand_map({address, columns, matrix_rows, 1}, box_rows, "an expert's weights"));
    }
    return maps;
  }
};

GroupedGemm::GroupedGemm(int device) : state_(std::make_unique<State>(device)) {
  require_hopper(device);
  state_->sms = device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

GroupedGemm::~GroupedGemm() = default;

int GroupedGemm::sms() const {
  return state_->sms;
}

void GroupedGemm::forward(const ForwardGemm& gemm) {
  require_rows(gemm.rows);
  require_width("n", gemm.n);
  require_width("k", gemm.k);
  require_matrices("w", gemm.w, gemm.rows.experts);
  if (gemm.rows.rows == 0) return;
  require_address("out", gemm.out);
  const ScopedDevice scope(state_->device);
  const GemmConfig config =
      state_->configure(Layout::kForward, Epilogue::kBFloat16, gemm.w.addresses.size(), 0, gemm.tuning);
  GemmArguments arguments = grouped_arguments(gemm.rows, gemm.n, gemm.k);
  arguments.a = encode_operand_map({gemm.x, gemm.k, gemm.rows.rows, 1}, kTileM, "x");
  arguments.map_per_expert = gemm.w.addresses.empty() ? 0 : 1;
  arguments.output_leading = gemm.n;
  state_->start(
      config, {arguments, State::weight_maps(gemm.w, gemm.rows.experts, gemm.n, gemm.k, config.tile_n / 2), {gemm.out}},
      gemm.tuning, gemm.stream);
}

void GroupedGemm::forward_swiglu(const ForwardSwigluGemm& gemm) {
  require_rows(gemm.rows);
  require_width("i", gemm.i);
  require_width("k", gemm.k);
  require_matrices("w1", gemm.w1, gemm.rows.experts);
  if (gemm.rows.rows == 0) return;
  require_address("a", gemm.a);
  if (gemm.z != nullptr) require_address("z", gemm.z);
  require(gemm.prob != nullptr, "prob must be a device address");
  const ScopedDevice scope(state_->device);
  const GemmConfig config =
      state_->configure(Layout::kForward, Epilogue::kSwiglu, gemm.w1.addresses.size(), 0, gemm.tuning);
  GemmArguments arguments = grouped_arguments(gemm.rows, gemm.i, gemm.k);
  arguments.a = encode_operand_map({gemm.x, gemm.k, gemm.rows.rows, 1}, kTileM, "x");
  arguments.map_per_expert = gemm.w1.addresses.empty() ? 0 : 1;
  arguments.output_leading = 2 * static_cast<int64_t>(gemm.i);
  arguments.activation = static_cast<BFloat16*>(gemm.a);
  arguments.prob = gemm.prob;
  state_->start(
      config,
      {arguments, State::weight_maps(gemm.w1, gemm.rows.experts, 2 * gemm.i, gemm.k, config.tile_n / 2), {gemm.z}},
      gemm.tuning, gemm.stream);
}

void GroupedGemm::input_gradient(const InputGradientGemm& gemm) {
  require_rows(gemm.rows);
  require_width("n", gemm.n);
  require_width("k", gemm.k);
  require_matrices("w", gemm.w, gemm.rows.experts);
  if (gemm.rows.rows == 0) return;
  require_address("dx", gemm.dx);
  const ScopedDevice scope(state_->device);
  const GemmConfig config =
      state_->configure(Layout::kDgrad, Epilogue::kBFloat16, gemm.w.addresses.size(), 0, gemm.tuning);
  GemmArguments arguments = grouped_arguments(gemm.rows, gemm.n, gemm.k);
  arguments.a = encode_operand_map({gemm.dy, gemm.k, gemm.rows.rows, 1}, kTileM, "dy");
  arguments.map_per_expert = gemm.w.addresses.empty() ? 0 : 1;
  arguments.output_leading = gemm.n;
  state_->start(config, {arguments, State::weight_maps(gemm.w, gemm.rows.experts, gemm.k, gemm.n, kTileK), {gemm.dx}},
                gemm.tuning, gemm.stream);
}

int64_t GroupedGemm::swiglu_gradient_workspace_bytes(int64_t rows, int i) {
  return (i + kProbColumns - 1) / kProbColumns * rows * static_cast<int64_t>(sizeof(float));
}

void GroupedGemm::input_gradient_swiglu(const InputGradientSwigluGemm& gemm) {
  require_rows(gemm.rows);
  require_width("i", gemm.i);
  require_width("k", gemm.k);
  require_matrices("w2", gemm.w2, gemm.rows.experts);
  if (gemm.rows.rows == 0) return;
  require_address("z", gemm.z);
  require_address("a", gemm.a);
  require_address("dz", gemm.dz);
  require_address("workspace", gemm.workspace);
  require(gemm.prob != nullptr && gemm.dprob != nullptr, "prob and dprob must be device addresses");
  const ScopedDevice scope(state_->device);
  const GemmConfig config =
      state_->configure(Layout::kDgrad, Epilogue::kSwigluGradient, gemm.w2.addresses.size(), 0, gemm.tuning);
  GemmArguments arguments = grouped_arguments(gemm.rows, gemm.i, gemm.k);
  arguments.a = encode_operand_map({gemm.dy, gemm.k, gemm.rows.rows, 1}, kTileM, "dy");
  arguments.map_per_expert = gemm.w2.addresses.empty() ? 0 : 1;
  constexpr int kWarpRows = kTileM / kMathWarps;
  arguments.z = encode_transfer_map({gemm.z, gemm.rows.rows, 2, gemm.i}, kWarpRows, "z");
  arguments.dz = encode_transfer_map({gemm.dz, gemm.rows.rows, 2, gemm.i}, kWarpRows, "dz");
  arguments.recomputed = encode_transfer_map({gemm.a, gemm.rows.rows, 1, gemm.i}, kWarpRows, "a");
  arguments.prob = gemm.prob;
  arguments.prob_chunks = static_cast<float*>(gemm.workspace);
  arguments.prob_stride = gemm.rows.rows;
  const int box_rows = split_b_along_k(config) ? kTileK / 2 : kTileK;
  state_->start(config,
                {arguments, State::weight_maps(gemm.w2, gemm.rows.experts, gemm.k, gemm.i, box_rows), {nullptr}},
                gemm.tuning, gemm.stream);
  state_->sum_probs(gemm);
}

void GroupedGemm::weight_gradient(const WeightGradientGemm& gemm) {
  require_rows(gemm.rows);
  require(gemm.rows.rows <= kMostColumns, "rows.rows is " + std::to_string(gemm.rows.rows) +
                                              ": weight gradients sum up to " + std::to_string(kMostColumns) + " rows");
  require_width("m", gemm.m);
  require_width("n", gemm.n);
  require_matrices("dw", gemm.dw, gemm.rows.experts);
  for (void* address : gemm.dw.addresses) require_address("an address of dw", address);
  const ScopedDevice scope(state_->device);
  const GemmConfig config = state_->configure(Layout::kWgrad, epilogue_of(gemm.weight_gradient), 0, 0, gemm.tuning);
  launch_weight_gradient(state_->kernels, config,
                         {.rows = gemm.rows,
                          .a = gemm.dy,
                          .b = gemm.x,
                          .m = gemm.m,
                          .n = gemm.n,
                          .dw = gemm.dw,
                          .raster = state_->raster(config, gemm.n, gemm.tuning)},
                         {state_->available(config, gemm.tuning), static_cast<CUstream>(gemm.stream)});
}

void GroupedGemm::prepare(int per_expert_addresses) {
  const ScopedDevice scope(state_->device);
  std::vector<KernelRequest> requests;
  for (GemmConfig config : default_configs()) {
    if (config.layout == Layout::kWgrad) {
      config.outputs = table_capacity(per_expert_addresses);
    } else {
      config.maps = table_capacity(per_expert_addresses);
    }
    requests.push_back(gemm_request(config));
  }
  requests.push_back(prob_sum_request());
  state_->kernels.prepare(requests);
}

}  // namespace uniep
