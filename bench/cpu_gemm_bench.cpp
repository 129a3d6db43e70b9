// How fast the CPU engine's GEMM is beside OpenBLAS sgemm on one core. Runs of the two alternate, so that a change of
// the machine's speed hits both; the ratio of a pair of runs is taken first and the median of the ratios reported.
//
//   cpu_gemm_bench              a table of shapes and operand layouts
//   cpu_gemm_bench --check R    only the reference shape; exit status 1 when the median ratio is below R
//
// UNIEP_INSTRUCTION_SET picks our kernels. OpenBLAS gets its own kernels for the same instruction set: left alone, a
// release that is older than the CPU takes SSE kernels for it, which are no yardstick.
#include <cblas.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "engine/cpu/kernels.h"
#include "model/elementwise.h"

namespace {

using uniep::BFloat16;
using uniep::cpu::GemmOperand;
using uniep::cpu::InstructionSet;

struct Shape {
  int64_t m, n, k;
};

constexpr Shape kReferenceShape{512, 1024, 1024};
constexpr Shape kShapes[] = {kReferenceShape,  {64, 64, 1024},   {128, 128, 1024},
                             {128, 256, 4096}, {256, 256, 4096}, {128, 256, 14336}};
constexpr double kSecondsPerRun = 5e-3;  // calls are repeated until a run takes about this long

// Uniform in [-1, 1), of 8 bits, so that bf16 holds it exactly.
std::vector<BFloat16> random_values(int64_t count, uint32_t seed) {
  std::vector<BFloat16> values(static_cast<std::size_t>(count));
  for (BFloat16& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = uniep::to_bfloat16(static_cast<float>(static_cast<int32_t>(seed) >> 24) / 128.0f);
  }
  return values;
}

std::vector<float> widen(const std::vector<BFloat16>& values) {
  std::vector<float> result;
  result.reserve(values.size());
  for (const BFloat16 value : values) result.push_back(uniep::to_float(value));
  return result;
}

// Of this thread's processor time: what other programs on the machine take does not count.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <class Function>
double seconds(int calls, const Function& function) {
  const double begin = thread_seconds();
  for (int i = 0; i < calls; ++i) function();
  return thread_seconds() - begin;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

struct Result {
  double ours, openblas;  // GFLOP/s, medians
  double ratio;           // median over pairs of runs of ours / openblas
};

// Operands are dense; OpenBLAS gets the same layouts.
Result compare(InstructionSet set, Shape shape, bool a_k_major, bool b_k_major, int pairs) {
  const int64_t m = shape.m, n = shape.n, k = shape.k;
  const std::vector<BFloat16> a = random_values(m * k, 1), b = random_values(n * k, 2);
  const std::vector<float> wide_a = widen(a), wide_b = widen(b);
  std::vector<float> c(static_cast<std::size_t>(m * n)), blas_c(c.size());
  const GemmOperand left{a.data(), a_k_major ? k : m, a_k_major};
  const GemmOperand right{b.data(), b_k_major ? k : n, b_k_major};
  uniep::cpu::GemmScratch scratch;
  const auto gemm = uniep::cpu::kernels(set).gemm;

  const auto ours = [&] { gemm({left, right, m, n, k, 0, c.data(), n}, scratch); };
  const auto openblas = [&] {
    cblas_sgemm(CblasRowMajor, a_k_major ? CblasNoTrans : CblasTrans, b_k_major ? CblasTrans : CblasNoTrans,
                static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1.0f, wide_a.data(),
                static_cast<int>(left.stride), wide_b.data(), static_cast<int>(right.stride), 0.0f, blas_c.data(),
                static_cast<int>(n));
  };
  const double once = std::max(seconds(1, ours), seconds(1, openblas));  // also warms caches and scratch
  const int calls = std::max(1, static_cast<int>(kSecondsPerRun / once));

  std::vector<double> our_rates, blas_rates, ratios;
  const double work = 2e-9 * static_cast<double>(m * n * k) * calls;
  for (int i = 0; i < pairs; ++i) {
    our_rates.push_back(work / seconds(calls, ours));
    blas_rates.push_back(work / seconds(calls, openblas));
    ratios.push_back(our_rates.back() / blas_rates.back());
  }
  return Result{median(our_rates), median(blas_rates), median(ratios)};
}

void print_row(InstructionSet set, Shape shape, bool a_k_major, bool b_k_major, const Result& result) {
  std::printf("%-8s %5lld %5lld %6lld  %-2s %-2s  %8.1f %9.1f %6.2f\n", uniep::cpu::instruction_set_name(set),
              static_cast<long long>(shape.m), static_cast<long long>(shape.n), static_cast<long long>(shape.k),
              a_k_major ? "K" : "MN", b_k_major ? "K" : "MN", result.ours, result.openblas, result.ratio);
  std::fflush(stdout);
}

void print_table(InstructionSet set) {
  std::printf("one core, GFLOP/s, medians; operand layouts: K = K-major, MN = M- or N-major; OpenBLAS core: %s\n",
              openblas_get_corename());
  std::printf("set          m     n      k  a  b       ours  openblas  ratio\n");
  for (const Shape& shape : kShapes) {
    for (const bool a_k_major : {true, false}) {
      for (const bool b_k_major : {true, false}) {
        print_row(set, shape, a_k_major, b_k_major, compare(set, shape, a_k_major, b_k_major, 41));
      }
    }
  }
}

int check(InstructionSet set, double least) {
  const Result result = compare(set, kReferenceShape, true, true, 41);
  print_row(set, kReferenceShape, true, true, result);
  if (result.ratio >= least) return 0;
  std::fprintf(stderr, "the median ratio to OpenBLAS sgemm is %.2f, it must be at least %.2f\n", result.ratio, least);
  return 1;
}

// OpenBLAS reads OPENBLAS_CORETYPE when it is loaded, before main: so it is set and the program started once more.
void choose_openblas_core(InstructionSet set, char** argv) {
  if (std::getenv("OPENBLAS_CORETYPE") != nullptr || set == InstructionSet::kPortable) return;
  setenv("OPENBLAS_CORETYPE", set == InstructionSet::kAvx512 ? "SkylakeX" : "Haswell", 1);
  execv("/proc/self/exe", argv);
  std::fprintf(stderr, "could not start again with OPENBLAS_CORETYPE set; OpenBLAS takes its own choice\n");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const InstructionSet set = uniep::cpu::best_instruction_set();
    choose_openblas_core(set, argv);
    openblas_set_num_threads(1);
    uniep::cpu::set_exact_arithmetic();
    if (argc == 1) {
      print_table(set);
      return 0;
    }
    char* end = nullptr;
    if (argc == 3 && std::strcmp(argv[1], "--check") == 0) {
      const double least = std::strtod(argv[2], &end);
      if (end != argv[2] && *end == '\0' && least > 0) return check(set, least);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  std::fprintf(stderr, "usage: cpu_gemm_bench [--check RATIO], RATIO a number above 0\n");
  return 2;
}
