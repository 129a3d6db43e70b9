// Compiles the library's kernels for sm_90a without a GPU: all defaults, and a seeded sample of other shapes. Fails on
// register spills, on ptxas advisories (setmaxnreg ignored, wgmma serialised) and on too much shared memory.
// Usage: compile_kernels_test [SAMPLES] [SEED] [RECORD]. Exit status 77 where NVRTC is missing.
// Of kernels that compiled well, from these sources and by this compiler, when compiled_well.txt was written, a quarter
// is compiled again; all, where any source has changed. With RECORD all are compiled, and then it is written to there.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/cuda/kernels/array_checksum.h"
#include "engine/cuda/kernels/bias_kernels.h"
#include "engine/cuda/kernels/exchange.h"
#include "engine/cuda/kernels/gemm_kernels.h"
#include "engine/cuda/kernels/layer_kernels.h"
#include "engine/cuda/kernels/place_kernels.h"
#include "engine/cuda/runtime/background_compiler.h"
#include "engine/cuda/runtime/kernel_cache.h"
#include "model/elementwise.h"
#include "tests/cuda/gpu_support.h"
#include "uniep/error.h"

namespace {

using namespace uniep::cuda;

std::vector<GemmConfig> sampled_configs(int samples, unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
  const std::vector<GemmConfig> defaults = default_configs();
  std::vector<GemmConfig> configs;
  for (int i = 0; i < samples; ++i) {
    GemmConfig config = defaults[static_cast<size_t>(pick(static_cast<int>(defaults.size())))];
    config.tile_n = pick(2) == 0 ? 128 : config.epilogue == Epilogue::kSwigluGradient ? 192 : 256;
    config.cluster = 1 + pick(2);
    const int fewest = fewest_stages(config);
    config.pipeline_stages = fewest + pick(largest_stages(config) - fewest + 1);
    (config.layout == Layout::kWgrad ? config.outputs : config.maps) = table_capacity(1 + pick(64));
    configs.push_back(config);
  }
  return configs;
}

// All stages from the fewest to the most are legal; one more or less is refused by a message that names the limits.
int count_wrong_limits(GemmConfig config) {
  const int fewest = fewest_stages(config);
  const int most = largest_stages(config);
  const std::string limits = "must be " + std::to_string(fewest) + " to " + std::to_string(most);
  int wrong = 0;
  for (config.pipeline_stages = fewest - 1; config.pipeline_stages <= most + 1; ++config.pipeline_stages) {
    const bool legal = config.pipeline_stages >= fewest && config.pipeline_stages <= most;
    std::string message;
    try {
      require_legal(config);
    } catch (const uniep::Error& error) {
      message = error.what();
    }
    if (legal ? message.empty() : message.find(limits) != std::string::npos) continue;
    std::printf("FAIL %d stages of %d columns: '%s'\n", config.pipeline_stages, config.tile_n, message.c_str());
    ++wrong;
  }
  return wrong;
}

void add_storage_sizes(LayerGemms gemms, int first_tile_n, std::set<std::string>& sizes) {
  for (const int tile_n : {128, gemms == LayerGemms::kFirstGradient ? 192 : 256}) {
    for (const int cluster : {1, 2}) {
      for (int stages = 2; stages <= 8; ++stages) {
        for (int chunk_bytes = 512; chunk_bytes <= 65536; chunk_bytes *= 2) {
          for (int copy_stages = 1; copy_stages <= kMaxCopyStages; ++copy_stages) {
            try {
              const LayerKernelConfig config = layer_config({.gemms = gemms,
                                                             .tile_n = tile_n,
                                                             .first_tile_n = first_tile_n,
                                                             .cluster = cluster,
                                                             .pipeline_stages = stages,
                                                             .ring_stage_bytes = chunk_bytes,
                                                             .copy_stages = copy_stages});
              sizes.insert("static_cast<LayerGemms>(" + std::to_string(static_cast<int>(gemms)) + "), " +
                           std::to_string(tile_n) + ", " + std::to_string(config.first_tile_n) + ", " +
                           std::to_string(stages) + ", " + std::to_string(cluster) + ", " +
                           std::to_string(chunk_bytes) + ", " + std::to_string(config.gemm.copy_stages));
            } catch (const uniep::Error&) {  // no such kernel
            }
          }
        }
      }
    }
  }
}

// Sources that compile if the megakernel's shared memory is as large as the host thinks, whatever a Schedule asks for.
// Several, since the compiler's time grows with the square of what is asserted.
std::vector<KernelRequest> layer_storage_requests(std::size_t& count) {
  constexpr std::size_t kSizesOfASource = 500;
  std::set<std::string> sizes;
  for (const LayerGemms gemms : {LayerGemms::kForward, LayerGemms::kFirstGradient, LayerGemms::kSecondGradient}) {
    add_storage_sizes(gemms, 0, sizes);
  }
  for (const int first_tile_n : {128, 192}) add_storage_sizes(LayerGemms::kGradients, first_tile_n, sizes);
  count = sizes.size();
  const std::string begin = R"(#include "engine/cuda/device/shared_memory/layer_storage.h"
namespace uniep::cuda {
template <LayerGemms kGemms, int kTileN, int kFirstTileN, int kStages, int kCluster, int kChunkBytes, int kCopyStages>
constexpr bool fits() {
  constexpr GemmConfig kGemm = layer_gemm(kGemms, {.tile_n = kTileN, .pipeline_stages = kStages, .cluster = kCluster,
                                                   .ring_stage_bytes = kChunkBytes, .copy_stages = kCopyStages});
  constexpr LayerKernelConfig kLayer{
      .gemms = kGemms,
      .gemm = kGemms == LayerGemms::kGradients ? beside_first_gradient(kGemm, kFirstTileN) : kGemm,
      .mixed = kGemms == LayerGemms::kGradients,
      .first_tile_n = kFirstTileN};
  return sizeof(LayerStorage<kLayer>) <= shared_memory_bytes(kLayer.gemm) &&
         shared_memory_bytes(kLayer.gemm) <= kSharedMemoryLimit &&
         sizeof(SharedStorage<first_gemm(kLayer)>) == sizeof(SharedStorage<kLayer.gemm>);
}
)";
  std::vector<KernelRequest> requests;
  std::size_t at = 0;
  for (const std::string& size : sizes) {
    if (at++ % kSizesOfASource == 0) requests.push_back({"layer_storage_test.cu", "uniep_layer_storage", {}, begin});
    requests.back().text += "static_assert(fits<" + size + ">(), \"" + size + "\");\n";
  }
  for (KernelRequest& request : requests) request.text += "extern \"C\" __global__ void uniep_layer_storage() {}\n}\n";
  return requests;
}

// The other activations backward, where registers are fewest, and some forward; without a gate, and with the router's
// weight on the input. What a form has of two others is not compiled by itself: it is the longest part of these tests.
std::vector<LayerKernelConfig> activation_configs() {
  using uniep::ActivationKind;
  ExpertConfig shaped{.activation = ActivationKind::kShapedSwiglu};
  shaped.alpha = uniep::bits_of_float(1.702f);
  shaped.gate_limit = shaped.up_limit = uniep::bits_of_float(7.0f);
  shaped.up_offset = uniep::bits_of_float(1.0f);
  ExpertConfig biased = shaped;  // gpt-oss
  biased.bias = biased.weighs_output = true;
  ExpertConfig input = shaped;
  input.weighs_z = true;
  ExpertConfig no_gate{.activation = ActivationKind::kRelu2};
  no_gate.bias = no_gate.weighs_output = true;
  std::vector<LayerKernelConfig> configs = {
      layer_config({.expert = biased}), layer_config({.expert = input}), layer_config({.expert = no_gate}),
      layer_config({.gemms = LayerGemms::kSecondGradient, .filled = FilledGradients::kAccumulate, .expert = no_gate})};
  for (const ExpertConfig& expert : {input, ExpertConfig{.activation = ActivationKind::kGegluTanh},
                                     ExpertConfig{.activation = ActivationKind::kGegluErf},
                                     ExpertConfig{.activation = ActivationKind::kSilu, .weighs_z = true}}) {
    configs.push_back(layer_config({.gemms = LayerGemms::kFirstGradient, .tile_n = 192, .expert = expert}));
  }
  configs.push_back(layer_config(
      {.gemms = LayerGemms::kGradients, .filled = FilledGradients::kAccumulate, .mixed = true, .expert = shaped}));
  return configs;
}

bool compiles_well(const KernelRequest& request) {
  const auto begin = std::chrono::steady_clock::now();
  const CompiledKernel kernel = compile_kernel(request);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const bool good = kernel.use.registers > 0 && kernel.use.spill_bytes == 0 && kernel.use.stack_bytes == 0 &&
                    kernel.use.advisories.empty() && !kernel.cubin.empty();
  std::printf("%-4s %3d registers %d spilled %d stack %4.1f s  %s\n", good ? "ok" : "FAIL", kernel.use.registers,
              kernel.use.spill_bytes, kernel.use.stack_bytes, seconds, request.description().c_str());
  for (const std::string& line : kernel.use.advisories) std::printf("     %s\n", line.c_str());
  std::fflush(stdout);
  return good;
}

// A process a core, since NVRTC compiles one kernel of a process at a time; each takes the next one until there is
// none. Returns how many processes saw a failure.
int compile_on_all_cores(const std::vector<KernelRequest>& requests) {
  using Counter = std::atomic<std::size_t>;
  void* const shared = ::mmap(nullptr, sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  auto* const next = new (shared) Counter(0);
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (unsigned core = 0; core < std::max(1u, std::thread::hardware_concurrency()); ++core) {
    const pid_t child = ::fork();
    if (child == 0) {
      bool good = true;
      try {
        for (std::size_t i = (*next)++; i < requests.size(); i = (*next)++) good = compiles_well(requests[i]) && good;
      } catch (const std::exception& error) {
        std::printf("FAIL %s\n", error.what());
        good = false;
      }
      std::fflush(stdout);
      ::_exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  int failures = 0;
  for (const pid_t child : children) {
    int status = 0;
    const bool ended = child > 0 && ::waitpid(child, &status, 0) == child;
    if (!ended || !WIFEXITED(status) || WEXITSTATUS(status) != 0) ++failures;
  }
  if (*next < requests.size()) ++failures;
  return failures;
}

// Keys of kernels that compiled well; without the file none.
std::set<std::string> known_kernels() {
  std::ifstream file(uniep::cuda::test::kernel_folder() + "/compiled_well.txt");
  std::set<std::string> keys;
  for (std::string line; std::getline(file, line);) keys.insert(line);
  return keys;
}

std::vector<KernelRequest> without_most_known(const std::vector<KernelRequest>& requests) {
  constexpr std::size_t kEvery = 4;
  const std::set<std::string> known = known_kernels();
  std::vector<KernelRequest> left;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (i % kEvery == 0 || !known.contains(cache_key(requests[i]))) left.push_back(requests[i]);
  }
  return left;
}

void record(const std::vector<KernelRequest>& requests, const std::string& path) {
  std::set<std::string> keys;
  for (const KernelRequest& request : requests) keys.insert(cache_key(request));
  std::ofstream file(path);
  for (const std::string& key : keys) file << key << "\n";
}

int run(int samples, unsigned seed, const std::string& record_path) {
  std::vector<GemmConfig> configs = default_configs();
  const std::vector<GemmConfig> more = sampled_configs(samples, seed);
  configs.insert(configs.end(), more.begin(), more.end());
  int failures = 0;
  for (const GemmConfig& config : configs) failures += count_wrong_limits(config);
  std::size_t sizes = 0;
  std::vector<KernelRequest> requests = layer_storage_requests(sizes);
  const bool has_sizes = sizes > 1000;
  std::printf("%-4s the megakernel's shared memory, %zu sizes\n", has_sizes ? "ok" : "FAIL", sizes);
  if (!has_sizes) ++failures;
  for (const KernelRequest& request :
       {checksum_request(), prob_sum_request(), naive_request("uniep_naive_gemm"), place_request(),
        row_of_source_request(), program_tables_request(), begin_call_request(), slots_of_map_request(),
        dense_dprobs_request(), bias_gradients_request()}) {
    requests.push_back(request);
  }
  using Tests = uniep::cuda::test::Kernels;
  const std::string folder = uniep::cuda::test::kernel_folder();
  for (const char* const function : {"test_checksum", "test_compare", "test_sample"}) {
    requests.push_back(Tests::request(folder, "test_kernels.cu", function));
  }
  requests.push_back(Tests::request(folder, "layer_oracle_kernels.cu", "oracle_combine"));
  for (const char* const function : {"litmus_pairs", "litmus_cluster"}) {
    requests.push_back(Tests::request(folder, "litmus_kernels.cu", function));
  }
  for (const LayerKernelConfig& config : default_layer_configs()) requests.push_back(layer_request(config));
  requests.push_back(layer_request(layer_config({.expert = {.weighs_output = true}})));
  for (const LayerKernelConfig& config : activation_configs()) requests.push_back(layer_request(config));
  for (const ExchangeConfig& config : default_exchange_configs()) requests.push_back(exchange_request(config));
  std::set<std::string> seen;
  for (const GemmConfig& config : configs) {
    const KernelRequest request = gemm_request(config);
    if (shared_memory_bytes(config) > kSharedMemoryLimit) {
      std::printf("FAIL %s: %d bytes of shared memory, at most %d\n", request.description().c_str(),
                  shared_memory_bytes(config), kSharedMemoryLimit);
      ++failures;
    }
    if (seen.insert(request.description()).second) requests.push_back(request);
  }
  const std::vector<KernelRequest> compiled = record_path.empty() ? without_most_known(requests) : requests;
  const auto begin = std::chrono::steady_clock::now();
  failures += compile_on_all_cores(compiled);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%zu of %zu kernels in %.1f s, %d failures\n", compiled.size(), requests.size(), seconds, failures);
  if (failures == 0 && !record_path.empty()) record(requests, record_path);
  return failures == 0 ? 0 : 1;
}

// A process that ends while NVRTC compiles for the first time ends well.
int check_end_of_process() {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("UNIEP_CACHE_DIR", "", 1);
    const KernelRequest request = gemm_request(default_configs().front());
    const bool begun = BackgroundCompiler::of_process().prepare(std::vector{request}, {&request}).compiling == 1;
    ::usleep(300'000);
    std::exit(begun ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  const bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  std::printf("%-4s a process ends while a kernel is compiled in its background\n", good ? "ok" : "FAIL");
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::printf("NVRTC %s\n", compiler_version().c_str());
  } catch (const uniep::Error& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  try {
    const int failures = check_end_of_process();
    return failures + run(argc > 1 ? std::atoi(argv[1]) : 16, argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1,
                          argc > 3 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
