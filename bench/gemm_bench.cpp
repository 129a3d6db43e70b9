// Times the grouped GEMMs of one rank of an expert-parallel layer on one GPU: device events around all device work, L2
// cold, the median of --repeat runs; and a sustained sequence of all of them, where power decides.
// Usage: gemm_bench [--shape H,I,E,K] [--tokens T] [--ranks R] [--repeat N] [--sustained SECONDS] [--json FILE]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/cuda/driver.h"
#include "model/elementwise.h"
#include "uniep/error.h"
#include "uniep/grouped_gemm.h"

namespace {

using namespace uniep;
using namespace uniep::cuda;

struct Options {
  int hidden = 7168, intermediate = 2048, experts = 256, top_k = 8;
  int tokens = 8192, ranks = 8, repeat = 20;
  double sustained = 2.0;
  std::string json;
};

struct Result {
  std::string name;
  double milliseconds;
  double tflops;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), gemm_(0) {
    check(driver().cuEventCreate(&begin_, 0), "cuEventCreate");
    check(driver().cuEventCreate(&end_, 0), "cuEventCreate");
    choose_rows();
    const int64_t h = options.hidden;
    const int64_t i = options.intermediate;
    x_ = random(rows_.rows * h);
    dy_ = random(rows_.rows * h);
    a_ = random(rows_.rows * i);
    z_ = random(rows_.rows * 2 * i);
    out_h_ = memory(rows_.rows * h * 2);
    out_z_ = memory(rows_.rows * 2 * i * 2);
    w1_ = random(rows_.experts * 2 * i * h);
    w2_ = random(rows_.experts * i * h);
    main_grad_ = memory(rows_.experts * 2 * i * h * 4);
    prob_ = memory(rows_.rows * 4);
    dprob_ = memory(rows_.rows * 4);
    workspace_ = memory(GroupedGemm::swiglu_gradient_workspace_bytes(rows_.rows, options.intermediate));
    flush_ = memory(kFlushBytes);
    gemm_.prepare();
  }

  void run() {
    const int h = options_.hidden;
    const int i = options_.intermediate;
    const double dense = 2.0 * static_cast<double>(real_rows_) * h * i * 1e-9;
    const MutableExpertMatrices grad{pointer(main_grad_), {}};
    std::vector<std::pair<std::string, std::function<void()>>> ops = {
        {"fc1",
         [&] {
           gemm_.forward(rows_, pointer(x_), {pointer(w1_), {}}, pointer(out_z_), 2 * i, h, nullptr);
         }},
        {"fc1+swiglu",
         [&] {
           gemm_.forward_swiglu(rows_, pointer(x_), {pointer(w1_), {}}, static_cast<float*>(pointer(prob_)),
                                pointer(out_z_), pointer(a_), i, h, nullptr);
         }},
        {"fc2",
         [&] {
           gemm_.forward(rows_, pointer(a_), {pointer(w2_), {}}, pointer(out_h_), h, i, nullptr);
         }},
        {"dgrad2+dswiglu",
         [&] {
           gemm_.input_gradient_swiglu(rows_, pointer(dy_), {pointer(w2_), {}}, pointer(z_),
                                       static_cast<float*>(pointer(prob_)), pointer(a_), pointer(out_z_),
                                       static_cast<float*>(pointer(dprob_)), pointer(workspace_), i, h, nullptr);
         }},
        {"dgrad1",
         [&] {
           gemm_.input_gradient(rows_, pointer(z_), {pointer(w1_), {}}, pointer(out_h_), h, 2 * i, nullptr);
         }},
        {"wgrad2",
         [&] {
           gemm_.weight_gradient(rows_, pointer(dy_), pointer(a_), grad, h, i, WeightGradientMode::kBFloat16, nullptr);
         }},
        {"wgrad1+=", [&] {
           gemm_.weight_gradient(rows_, pointer(z_), pointer(x_), grad, 2 * i, h, WeightGradientMode::kAccumulate,
                                 nullptr);
         }}};
    for (const auto& [name, op] : ops) {
      const double work = name.find('1') != std::string::npos ? 2.0 * dense : dense;
      const double milliseconds = median(op);
      add({name, milliseconds, work / milliseconds});
    }
    if (options_.sustained > 0.0) sustained(ops, 11.0 * dense);  // fc1, dgrad1 and wgrad1 count twice
    if (!options_.json.empty()) write_json();
  }

 private:
  static constexpr int64_t kFlushBytes = 256 << 20;

  static void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

  static CUdeviceptr memory(int64_t bytes) {
    CUdeviceptr address = 0;
    check(driver().cuMemAlloc(&address, static_cast<size_t>(bytes)), "cuMemAlloc");
    check(driver().cuMemsetD8Async(address, 0, static_cast<size_t>(bytes), nullptr), "cuMemsetD8Async");
    return address;
  }

  // A random piece, over and over: never zeros, on which the tensor cores run faster.
  static CUdeviceptr random(int64_t count) {
    static const std::vector<BFloat16> piece = [] {
      std::mt19937 generator(1);
      std::normal_distribution<float> normal;
      std::vector<BFloat16> values(4 << 20);
      for (BFloat16& value : values) value = to_bfloat16(normal(generator));
      return values;
    }();
    const CUdeviceptr address = memory(count * 2);
    for (int64_t at = 0; at < count; at += static_cast<int64_t>(piece.size())) {
      const int64_t part = std::min(count - at, static_cast<int64_t>(piece.size()));
      check(driver().cuMemcpyHtoDAsync(address + static_cast<CUdeviceptr>(at) * 2, piece.data(),
                                       static_cast<size_t>(part) * 2, nullptr),
            "cuMemcpyHtoD");
    }
    check(driver().cuCtxSynchronize(), "filling with random values");
    return address;
  }

  // Uniform routing: each local expert's rows, as counted over the tokens of all ranks.
  void choose_rows() {
    const int local = options_.experts / options_.ranks;
    std::vector<int32_t> count(static_cast<size_t>(local));
    std::mt19937 generator(static_cast<unsigned>(options_.tokens));
    const double mean = static_cast<double>(options_.tokens) * options_.ranks * options_.top_k / options_.experts;
    std::poisson_distribution<int32_t> rows_of(mean);
    std::vector<int32_t> start;
    int64_t padded = 0;
    for (int32_t& rows : count) {
      rows = rows_of(generator);
      start.push_back(static_cast<int32_t>(padded));
      padded += (rows + 127) / 128 * 128;
      real_rows_ += rows;
    }
    const CUdeviceptr starts = memory(local * 4);
    const CUdeviceptr counts = memory(local * 4);
    check(driver().cuMemcpyHtoDAsync(starts, start.data(), start.size() * 4, nullptr), "cuMemcpyHtoD");
    check(driver().cuMemcpyHtoDAsync(counts, count.data(), count.size() * 4, nullptr), "cuMemcpyHtoD");
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
    rows_ = {local, padded, static_cast<int32_t*>(pointer(starts)), static_cast<int32_t*>(pointer(counts))};
  }

  double timed(const std::function<void()>& work) {
    check(driver().cuEventRecord(begin_, nullptr), "cuEventRecord");
    work();
    check(driver().cuEventRecord(end_, nullptr), "cuEventRecord");
    check(driver().cuEventSynchronize(end_), "cuEventSynchronize");
    float milliseconds = 0.0f;
    check(driver().cuEventElapsedTime(&milliseconds, begin_, end_), "cuEventElapsedTime");
    return milliseconds;
  }

  double median(const std::function<void()>& op) {
    constexpr int kWarmUp = 3;
    std::vector<double> times;
    for (int turn = 0; turn < options_.repeat + kWarmUp; ++turn) {
      check(driver().cuMemsetD8Async(flush_, static_cast<unsigned char>(turn), kFlushBytes, nullptr), "flushing L2");
      const double milliseconds = timed(op);
      if (turn >= kWarmUp) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  void sustained(const std::vector<std::pair<std::string, std::function<void()>>>& ops, double work) {
    const auto all = [&] {
      for (const auto& [name, op] : ops) op();
    };
    const double one = timed(all);
    const int turns = std::max(1, static_cast<int>(options_.sustained * 1000.0 / one));
    const double total = timed([&] {
      for (int turn = 0; turn < turns; ++turn) all();
    });
    add({"sustained, all", total / turns, work / (total / turns)});
  }

  void add(const Result& result) {
    std::printf("%-16s %9.3f ms %7.0f TFLOP/s\n", result.name.c_str(), result.milliseconds, result.tflops);
    results_.push_back(result);
  }

  void write_json() const {
    std::ofstream file(options_.json);
    file << "{\"device\": \"" << device_name(0) << "\", \"shape\": [" << options_.hidden << ", "
         << options_.intermediate << ", " << options_.experts << ", " << options_.top_k
         << "], \"tokens\": " << options_.tokens << ", \"rows\": " << real_rows_ << ", \"results\": [";
    for (size_t i = 0; i < results_.size(); ++i) {
      file << (i == 0 ? "" : ", ") << "{\"op\": \"" << results_[i].name << "\", \"ms\": " << results_[i].milliseconds
           << ", \"tflops\": " << results_[i].tflops << "}";
    }
    file << "]}\n";
    if (!file) throw Error(Status::kIo, "can not write " + options_.json);
  }

  const Options options_;
  GroupedGemm gemm_;
  ExpertRows rows_;
  int64_t real_rows_ = 0;
  CUevent begin_ = nullptr;
  CUevent end_ = nullptr;
  CUdeviceptr x_, dy_, a_, z_, out_h_, out_z_, w1_, w2_, main_grad_, prob_, dprob_, workspace_, flush_;
  std::vector<Result> results_;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const char* const value = argv[i + 1];
    if (name == "--shape") {
      if (std::sscanf(value, "%d,%d,%d,%d", &options.hidden, &options.intermediate, &options.experts, &options.top_k) !=
          4) {
        throw Error(Status::kInvalidArgument, std::string("--shape is '") + value + "': it must be H,I,E,K");
      }
    } else if (name == "--tokens") {
      options.tokens = std::atoi(value);
    } else if (name == "--ranks") {
      options.ranks = std::atoi(value);
    } else if (name == "--repeat") {
      options.repeat = std::atoi(value);
    } else if (name == "--sustained") {
      options.sustained = std::atof(value);
    } else if (name == "--json") {
      options.json = value;
    } else {
      throw Error(Status::kInvalidArgument, "unknown option " + name);
    }
  }
  if (options.tokens < 1 || options.ranks < 1 || options.experts < options.ranks || options.repeat < 1) {
    throw Error(Status::kInvalidArgument, "tokens, ranks and repeat must be positive, and experts at least ranks");
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    require_hopper(0);
    const ScopedDevice scope(0);
    Bench(options).run();
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "gemm_bench: %s\n", error.what());
    return error.status() == Status::kInvalidArgument ? 2 : 1;
  }
}
