// Each wrapper of the PTX layer on a GPU, against plain loops. Exit status 77 without a Hopper GPU.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "engine/cuda/kernels/array_checksum.h"
#include "engine/cuda/kernels/tensor_maps.h"
#include "engine/cuda/runtime/device_array.h"
#include "io/checksum.h"
#include "model/elementwise.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/ptx_arguments.h"

namespace uniep::cuda::test {
namespace {

std::vector<uint16_t> small_integers(int64_t count, int seed) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    const int value = static_cast<int>((i * 2654435761u + static_cast<size_t>(seed) * 40503u) >> 7) % 17 - 8;
    values[i] = to_bfloat16(static_cast<float>(value)).bits;
  }
  return values;
}

float value_of(uint16_t bits) {
  return to_float(BFloat16{bits});
}

class PtxTests {
 public:
  PtxTests(Results& results, std::string folder) : results_(results), kernels_(0, std::move(folder)) {}

  // Boxes at column 64, row 32 of a tensor of 104 columns and 80 rows: part of them is outside.
  void tma() {
    constexpr int kColumns = 104;
    constexpr int kRows = 80;
    constexpr int kDepth = 2;
    constexpr int64_t kCount = kColumns * kRows * kDepth;
    const std::vector<uint16_t> source = small_integers(kCount, 1);
    const std::vector<uint16_t> start = small_integers(kCount, 2);
    const Buffer from(kCount * 2);
    const Buffer to(kCount * 2);
    from.upload(source);
    to.upload(start);
    PtxArguments args{};
    args.load = encode_operand_map({from.as<void>(), kColumns, kRows, kDepth}, 64, "source");
    args.store = encode_operand_map({to.as<void>(), kColumns, kRows, kDepth}, 64, "target");
    kernels_.run("ptx_kernels.cu", "test_tma", {.threads = 32}, args);
    const auto got = to.download<uint16_t>(kCount);
    int wrong = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const bool inside = i % kColumns >= 64 && i / kColumns % kRows >= 32 && i / (kColumns * kRows) == 1;
      const size_t at = static_cast<size_t>(i);
      wrong += value_of(got[at]) != value_of(inside ? source[at] : start[at]);
    }
    results_.record("TMA load and store", wrong == 0, std::to_string(wrong) + " wrong");
  }

  void bulk() {
    const std::vector<uint16_t> source = small_integers(3 * 2048, 3);
    const Buffer from(3 * 4096);
    const Buffer to(3 * 4096);
    from.upload(source);
    to.set_bytes(0xff);
    PtxArguments args{};
    args.source = from.as<uint16_t>();
    args.target = to.as<uint16_t>();
    kernels_.run("ptx_kernels.cu", "test_bulk", {.threads = 32}, args);
    results_.record("bulk load and store", to.download<uint16_t>(3 * 2048) == source);
  }

  // Of arrays of whole words and not, of less than a warp's and of more than a launch's.
  void checksums() {
    for (const int64_t bytes : {0, 2, 4, 126, 4096, (1 << 24) + 6}) {
      const std::vector<uint16_t> values = small_integers(bytes / 2, 6);
      std::vector<float> words(static_cast<size_t>(bytes + 3) / 4);
      std::memcpy(words.data(), values.data(), static_cast<size_t>(bytes));
      const DeviceArray array(0, values.data(), bytes);
      results_.record("checksum of " + std::to_string(bytes) + " bytes",
                      array_checksum(0, array.data(), bytes, 5) ==
                          io::checksum(words.data(), static_cast<int64_t>(words.size()), 5));
    }
  }

  void cluster() {
    const std::vector<uint16_t> source = small_integers(128 * 64, 4);
    const Buffer from(128 * 64 * 2);
    const Buffer to(2 * 128 * 64 * 2);
    const Buffer words(8);
    from.upload(source);
    PtxArguments args{};
    args.load = encode_operand_map({from.as<void>(), 64, 128, 1}, 64, "source");
    args.target = to.as<uint16_t>();
    args.words = words.as<uint32_t>();
    kernels_.run("ptx_kernels.cu", "test_cluster", {.grid_x = 2, .threads = 128}, args);
    std::vector<uint16_t> twice = source;
    twice.insert(twice.end(), source.begin(), source.end());
    results_.record("multicast to a cluster", to.download<uint16_t>(2 * 128 * 64) == twice);
    results_.record("cluster rank, remote arrival", words.download<uint32_t>(2) == std::vector<uint32_t>{0, 1});
  }

  void wgmma() {
    for (const int n : {64, 128, 256}) {
      for (int majors = 0; majors < 4; ++majors) {
        const bool a_mn = majors % 2 != 0;
        const bool b_mn = majors / 2 != 0;
        const std::vector<uint16_t> a = small_integers(64 * 64, n + majors);
        const std::vector<uint16_t> b = small_integers(n * 64, n + majors + 9);
        const Buffer a_memory(64 * 64 * 2);
        const Buffer b_memory(n * 64 * 2);
        const Buffer d(64 * n * 4);
        a_memory.upload(a);
        b_memory.upload(b);
        d.set_bytes(0xff);
        PtxArguments args{};
        args.load = encode_operand_map({a_memory.as<void>(), 64, 64, 1}, 64, "A");
        args.store = b_mn ? encode_operand_map({b_memory.as<void>(), n, 64, 1}, 64, "B")
                          : encode_operand_map({b_memory.as<void>(), 64, n, 1}, 64, "B");
        args.result = d.as<float>();
        kernels_.run("ptx_kernels.cu", "test_wgmma", {.threads = 128, .shared_bytes = 41 * 1024}, args,
                     {"TEST_N=" + std::to_string(n), "TEST_MAJOR_A=" + std::to_string(a_mn),
                      "TEST_MAJOR_B=" + std::to_string(b_mn)});
        const auto got = d.download<float>(static_cast<size_t>(64 * n));
        int wrong = 0;
        for (int row = 0; row < 64; ++row) {
          for (int column = 0; column < n; ++column) {
            float sum = 0.0f;  // exact: small integers
            for (int k = 0; k < 64; ++k) {
              const int a_at = a_mn ? k * 64 + row : row * 64 + k;
              const int b_at = b_mn ? k * n + column : column * 64 + k;
              sum += value_of(a[static_cast<size_t>(a_at)]) * value_of(b[static_cast<size_t>(b_at)]);
            }
            wrong += got[static_cast<size_t>(row * n + column)] != sum;
          }
        }
        results_.record("wgmma N=" + std::to_string(n) + (a_mn ? " A MN-major" : " A K-major") +
                            (b_mn ? " B MN-major" : " B K-major"),
                        wrong == 0, std::to_string(wrong) + " wrong");
      }
    }
  }

  void warp_and_flags() {
    const std::vector<uint16_t> source = small_integers(8, 5);
    const Buffer from(16);
    const Buffer to(4096 * 2);
    const Buffer words(16);
    from.upload(source);
    words.set_bytes(0);
    PtxArguments args{};
    args.source = from.as<uint16_t>();
    args.target = to.as<uint16_t>();
    args.words = words.as<uint32_t>();
    kernels_.run("ptx_kernels.cu", "test_warp", {.threads = 384}, args);
    const auto seen = words.download<uint32_t>(4);
    results_.record("stmatrix and ldmatrix", seen[0] == 0);
    results_.record("cp.async with zero fill", seen[1] == 0);
    results_.record("named barrier, setmaxnreg", seen[2] == 128);
    words.set_bytes(0);
    kernels_.run("ptx_kernels.cu", "test_flags", {.grid_x = 2, .threads = 128, .cooperative = true}, args);
    results_.record("release, acquire and counters on one GPU", words.download<uint32_t>(3)[2] == 0);
  }

  // For every bf16 value, which is what gates are.
  void sigmoid() {
    std::vector<float> values(65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) values[bits] = to_float(BFloat16{static_cast<uint16_t>(bits)});
    const Buffer result(static_cast<int64_t>(values.size() * sizeof(float)));
    result.upload(values);
    PtxArguments args{};
    args.result = result.as<float>();
    kernels_.run("ptx_kernels.cu", "test_sigmoid", {.grid_x = 256, .threads = 256}, args);
    const auto seen = result.download<float>(values.size());
    double worst = 0.0;
    bool holds = true;
    for (size_t i = 0; i < values.size(); ++i) {
      const double exact = 1.0 / (1.0 + std::exp(-static_cast<double>(values[i])));
      if (std::fabs(values[i]) <= 80.0f) {
        const double error = std::fabs(seen[i] - exact) / exact;
        holds &= error < 1e-5;  // not so of NaN
        worst = std::max(worst, error);
      } else {
        holds &= std::isnan(values[i]) ? std::isnan(seen[i]) : std::fabs(seen[i] - exact) < 1e-30;
      }
    }
    results_.record("sigmoid", holds, "relative error " + std::to_string(worst));
  }

  // Behind all others, of which none spills.
  void spills() {
    constexpr int kValues = 64;
    std::vector<uint32_t> values(kValues);
    for (uint32_t i = 0; i < kValues; ++i) values[i] = i;
    const Buffer words(kValues * 4);
    words.upload(values);
    PtxArguments args{};
    args.words = words.as<uint32_t>();
    const int before = kernels_.local_bytes("ptx_kernels.cu");
    kernels_.run("ptx_kernels.cu", "test_spill", {.threads = 1}, args);
    const int after = kernels_.local_bytes("ptx_kernels.cu");
    std::reverse(values.begin(), values.end());
    results_.record("spilled registers are known",
                    before == 0 && after >= kValues && words.download<uint32_t>(kValues) == values,
                    std::to_string(before) + " bytes a thread, then " + std::to_string(after));
  }

 private:
  Results& results_;
  Kernels kernels_;
};

}  // namespace
}  // namespace uniep::cuda::test

int main() {
  using namespace uniep::cuda;
  try {
    require_hopper(0);
  } catch (const uniep::Error& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  try {
    const std::string path = __FILE__;
    const char* const given = std::getenv("UNIEP_TEST_KERNELS");
    test::Results results;
    results.verbose = true;
    const ScopedDevice scope(0);
    test::PtxTests tests(results, given != nullptr ? given : path.substr(0, path.rfind('/')));
    tests.tma();
    tests.bulk();
    tests.checksums();
    tests.cluster();
    tests.wgmma();
    tests.warp_and_flags();
    tests.sigmoid();
    tests.spills();
    std::printf("ptx tests: %d passed, %d failed\n", results.passed, results.failed);
    return results.failed == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
