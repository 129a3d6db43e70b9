// `uniep bench --op gemm`: the grouped GEMMs of an expert-parallel layer, each GPU with the rows of one rank.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <random>

#include "cli/bench_gpus.h"
#include "cli/bench_operation.h"
#include "uniep/error.h"
#include "uniep/grouped_gemm.h"

namespace uniep::cli {
namespace {

constexpr int64_t kRowAlignment = 128;

// One rank's matrices on one GPU.
struct RankProblem {
  ExpertRows rows;
  std::vector<int32_t> rows_per_expert;
  void *x, *dy, *a, *z, *out_h, *out_z, *w1, *w2, *dw, *main_grad;
  float *prob, *dprob;
  void* workspace;
};

struct Gemm {
  const char* name;
  int weight;  // in units of 2 rows H I floating-point operations
  void (*run)(GroupedGemm& gemm, const RankProblem& p, int h, int i);
};

const std::vector<Gemm>& measured_gemms() {
  static const std::vector<Gemm> kGemms = {
      {"fc1", 2,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.forward({.rows = p.rows, .x = p.x, .w = {p.w1, {}}, .out = p.out_z, .n = 2 * i, .k = h});
       }},
      {"fc1+swiglu", 2,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.forward_swiglu(
             {.rows = p.rows, .x = p.x, .w1 = {p.w1, {}}, .prob = p.prob, .z = p.out_z, .a = p.a, .i = i, .k = h});
       }},
      {"fc2", 1,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.forward({.rows = p.rows, .x = p.a, .w = {p.w2, {}}, .out = p.out_h, .n = h, .k = i});
       }},
      {"dgrad2", 1,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.input_gradient({.rows = p.rows, .dy = p.dy, .w = {p.w2, {}}, .dx = p.a, .n = i, .k = h});
       }},
      {"dgrad2+dswiglu", 1,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.input_gradient_swiglu({.rows = p.rows,
                                     .dy = p.dy,
                                     .w2 = {p.w2, {}},
                                     .z = p.z,
                                     .prob = p.prob,
                                     .a = p.a,
                                     .dz = p.out_z,
                                     .dprob = p.dprob,
                                     .workspace = p.workspace,
                                     .i = i,
                                     .k = h});
       }},
      {"dgrad1", 2,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.input_gradient({.rows = p.rows, .dy = p.z, .w = {p.w1, {}}, .dx = p.out_h, .n = h, .k = 2 * i});
       }},
      {"wgrad2", 1,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.weight_gradient({.rows = p.rows, .dy = p.dy, .x = p.a, .dw = {p.dw, {}}, .m = h, .n = i});
       }},
      {"wgrad1", 2,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.weight_gradient({.rows = p.rows, .dy = p.z, .x = p.x, .dw = {p.dw, {}}, .m = 2 * i, .n = h});
       }},
      {"wgrad1+=", 2,
       [](GroupedGemm& gemm, const RankProblem& p, int h, int i) {
         gemm.weight_gradient({.rows = p.rows,
                               .dy = p.z,
                               .x = p.x,
                               .dw = {p.main_grad, {}},
                               .m = 2 * i,
                               .n = h,
                               .weight_gradient = WeightGradient::kMainGrad});
       }},
  };
  return kGemms;
}

// How many rows each expert gets from the tokens of all ranks.
std::vector<int32_t> count_rows(const LayerOptions& layer) {
  std::vector<int32_t> counts(static_cast<std::size_t>(layer.shape.experts));
  for (const int32_t expert : make_ids(layer)) {
    if (expert >= 0) ++counts[static_cast<std::size_t>(expert)];
  }
  return counts;
}

RankProblem make_problem(BenchGpus& gpus, std::size_t gpu, const LayerOptions& layer,
                         const std::vector<int32_t>& counts) {
  const int64_t rank = static_cast<int64_t>(gpu) % layer.ranks;
  const int64_t first = rank * layer.shape.experts / layer.ranks;
  const int64_t last = (rank + 1) * layer.shape.experts / layer.ranks;
  RankProblem p;
  p.rows_per_expert.assign(counts.begin() + first, counts.begin() + last);
  const std::vector<int32_t>& own = p.rows_per_expert;
  std::vector<int32_t> starts;
  int64_t rows = 0;
  for (const int32_t count : own) {
    starts.push_back(static_cast<int32_t>(rows));
    rows += (count + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  }
  const int64_t experts = last - first;
  const auto bytes = static_cast<int64_t>(own.size() * sizeof(int32_t));
  p.rows = {static_cast<int>(experts), rows, static_cast<int32_t*>(gpus.copy_of(gpu, starts.data(), bytes)),
            static_cast<int32_t*>(gpus.copy_of(gpu, own.data(), bytes))};

  const int64_t h = layer.shape.hidden;
  const int64_t i = layer.shape.intermediate;
  p.x = gpus.random_bfloat16(gpu, rows * h);
  p.dy = gpus.random_bfloat16(gpu, rows * h);
  p.a = gpus.random_bfloat16(gpu, rows * i);
  p.z = gpus.random_bfloat16(gpu, rows * 2 * i);
  p.out_h = gpus.zeros(gpu, rows * h * 2);
  p.out_z = gpus.zeros(gpu, rows * 2 * i * 2);
  p.w1 = gpus.random_bfloat16(gpu, experts * 2 * i * h);
  p.w2 = gpus.random_bfloat16(gpu, experts * i * h);
  p.dw = gpus.zeros(gpu, experts * 2 * i * h * 2);
  p.main_grad = gpus.zeros(gpu, experts * 2 * i * h * 4);
  std::mt19937 generator(static_cast<unsigned>(layer.seed));
  std::uniform_real_distribution<float> weight(0.0f, 1.0f);
  std::vector<float> prob(static_cast<std::size_t>(rows));
  for (float& value : prob) value = weight(generator);
  p.prob = static_cast<float*>(gpus.copy_of(gpu, prob.data(), rows * 4));
  p.dprob = static_cast<float*>(gpus.zeros(gpu, rows * 4));
  p.workspace = gpus.zeros(gpu, GroupedGemm::swiglu_gradient_workspace_bytes(rows, static_cast<int>(i)));
  return p;
}

double host_milliseconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

BenchReport run_gemm(const BenchRequest& request) {
  const LayerShape& shape = request.layer.shape;
  const std::vector<int32_t> counts = count_rows(request.layer);
  BenchGpus gpus(request.devices, request.warm_up_seconds);
  BenchReport report;
  report.device = gpus.name();
  std::vector<RankProblem> problems;
  std::vector<std::unique_ptr<GroupedGemm>> gemms;
  for (std::size_t gpu = 0; gpu < gpus.count(); ++gpu) {
    problems.push_back(make_problem(gpus, gpu, request.layer, counts));
    const std::vector<int32_t>& own = problems.back().rows_per_expert;
    report.rows_per_expert.push_back(own);
    report.rows_per_rank.push_back(std::accumulate(own.begin(), own.end(), int64_t{0}));
    gemms.push_back(std::make_unique<GroupedGemm>(request.devices[gpu]));
  }
  const auto on_all = [&](const Gemm& gemm) {
    for (std::size_t gpu = 0; gpu < gpus.count(); ++gpu) {
      gemm.run(*gemms[gpu], problems[gpu], static_cast<int>(shape.hidden), static_cast<int>(shape.intermediate));
    }
  };

  const int64_t most_rows = *std::max_element(report.rows_per_rank.begin(), report.rows_per_rank.end());
  const double unit = 2.0 * static_cast<double>(most_rows) * static_cast<double>(shape.hidden * shape.intermediate);
  std::vector<Gemm> wanted;
  double all_flops = 0.0;
  for (const Gemm& gemm : measured_gemms()) {
    if (!request.wants(gemm.name)) continue;
    wanted.push_back(gemm);
    BenchResult result;
    result.name = gemm.name;
    result.flops = gemm.weight * unit;
    all_flops += result.flops;
    result.first_call_ms = host_milliseconds([&] {
      on_all(gemm);
      gpus.synchronize();
    });
    report.results.push_back(std::move(result));
  }
  // In turn: large GEMMs run at the power limit, where each has the same neighbours then.
  std::vector<BenchGpus::Work> works;
  for (const Gemm& gemm : wanted) works.push_back({[&on_all, gemm] { on_all(gemm); }, BenchGpus::Start::kBackToBack});
  const std::vector<std::vector<double>> milliseconds = gpus.time_cold_in_turn(works, request.repeat);
  for (std::size_t i = 0; i < works.size(); ++i) report.results[i].milliseconds = milliseconds[i];
  if (request.sustained_seconds > 0.0) {
    const auto sequence = [&] {
      for (const Gemm& gemm : wanted) on_all(gemm);
    };
    const double once = gpus.time(sequence);
    const int turns = std::max(1, static_cast<int>(request.sustained_seconds * 1000.0 / once));
    const double total = gpus.time([&] {
      for (int turn = 0; turn < turns; ++turn) sequence();
    });
    report.results.push_back({"sustained, all of these", {total / turns}, all_flops, 0.0, 0.0});
  }
  return report;
}

}  // namespace

BenchOperation gemm_operation() {
  std::vector<std::string> names;
  for (const Gemm& gemm : measured_gemms()) names.emplace_back(gemm.name);
  return {"gemm", "grouped GEMMs, a rank's rows on each GPU", names, run_gemm, false, false};
}

}  // namespace uniep::cli
