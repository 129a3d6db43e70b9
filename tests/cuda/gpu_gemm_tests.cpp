// Grouped GEMMs on a GPU: every layout and epilogue against the naive kernels, byte by byte, over ragged and empty
// experts, odd widths, tile shapes, stages, clusters, SM counts and layouts of the weights; and against float64.
// Usage: gpu_gemm_tests [--large] [--verbose] [--only TEXT]. Exit status 77 without a Hopper GPU.
#include <cstring>
#include <functional>

#include "engine/cuda/device/arguments/gemm_config.h"
#include "model/elementwise.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/naive_arguments.h"
#include "uniep/grouped_gemm.h"

namespace uniep::cuda::test {
namespace {

struct Shape {
  std::vector<int> counts;
  int n;
  int k;
  bool wide = false;
};

struct Variant {
  GemmTuning tuning;
  bool addresses = false;
};

const std::vector<Variant> kVariants = {
    {{}, false},
    {{}, true},
    {{.tile_n = 128, .stages = 0, .cluster = 2, .raster = 3, .sms = 0}, false},
    {{.tile_n = 256, .stages = 2, .cluster = 1, .raster = 1, .sms = 50}, true},
    {{.tile_n = 128, .stages = 3, .cluster = 1, .raster = 16, .sms = 7}, false},
    {{.tile_n = 128, .stages = 2, .cluster = 2, .raster = 5, .sms = 0}, false},
    {{.tile_n = 256, .stages = 3, .cluster = 2, .raster = 2, .sms = 2}, false},
};

class GemmTests {
 public:
  GemmTests(Results& results, std::string folder) : results_(results), kernels_(0, std::move(folder)), gemm_(0) {}

  void run(const Shape& shape, const std::string& only) {
    prepare(shape);
    const auto wanted = [&](const char* name) { return std::string(name).find(only) != std::string::npos; };
    if (wanted("forward")) forward();
    if (wanted("dgrad")) dgrad();
    if (wanted("swiglu")) swiglu();
    if (wanted("gradient")) swiglu_gradient();
    if (wanted("wgrad")) wgrad();
    check(driver().cuCtxSynchronize(), "end of a shape");
  }

 private:
  static constexpr const char* kNaive = "engine/cuda/device/kernels/naive_gemm.cu";
  static constexpr uint16_t kNan = 0x7fc0;

  void prepare(const Shape& shape) {
    shape_ = shape;
    experts_ = static_cast<int>(shape.counts.size());
    std::vector<int32_t> starts;
    rows_ = 0;
    most_ = 0;
    for (const int count : shape.counts) {
      starts.push_back(static_cast<int32_t>(rows_));
      rows_ += (count + 127) / 128 * 128;
      most_ = std::max(most_, count);
    }
    start_ = Buffer(experts_ * 4);
    count_ = Buffer(experts_ * 4);
    start_.upload(starts);
    count_.upload(std::vector<int32_t>(shape.counts.begin(), shape.counts.end()));
    expert_rows_ = {experts_, rows_, start_.as<int32_t>(), count_.as<int32_t>()};
    prob_ = Buffer(rows_ * 4);
    fill(FillArguments{nullptr, prob_.as<float>(), rows_, ++seed_, 1.0f, 0});
  }

  Buffer random(int64_t rows, int64_t columns, float scale) {
    Buffer buffer(rows * columns * 2);
    fill(FillArguments{buffer.as<uint16_t>(), nullptr, rows * columns, ++seed_, scale, shape_.wide ? 1 : 0});
    return buffer;
  }

  // Expert rows with their padding set.
  Buffer random_rows(int64_t columns, uint16_t padding) {
    Buffer buffer = random(rows_, columns, 1.0f);
    kernels_.run("test_kernels.cu", "test_fill_padding", {.grid_x = experts_, .threads = 256},
                 PaddingArguments{buffer.as<uint16_t>(), start_.as<int32_t>(), count_.as<int32_t>(), columns, padding});
    return buffer;
  }

  void fill(const FillArguments& arguments) {
    kernels_.run("test_kernels.cu", "test_fill", {.grid_x = 1024, .threads = 256}, arguments);
  }

  void expect_equal(const std::string& name, const Buffer& got, const Buffer& expected, int64_t bytes) {
    Buffer result(16);
    result.upload(std::vector<unsigned long long>{0, ~0ull});
    kernels_.run(
        "test_kernels.cu", "test_compare", {.grid_x = 1024, .threads = 256},
        CompareArguments{got.as<uint16_t>(), expected.as<uint16_t>(), bytes / 2, result.as<unsigned long long>()});
    const auto values = result.download<unsigned long long>(2);
    results_.record(label(name), values[0] == 0,
                    values[0] == 0 ? ""
                                   : std::to_string(values[0]) + " half-words differ, first at " +
                                         std::to_string(values[1]) + " of " + std::to_string(bytes / 2));
  }

  std::string label(const std::string& name) const {
    return name + " N=" + std::to_string(shape_.n) + " K=" + std::to_string(shape_.k) +
           " rows=" + std::to_string(rows_) + (shape_.wide ? " wide" : "");
  }

  static std::string variant_name(const Variant& v) {
    const GemmTuning& t = v.tuning;
    return std::string(v.addresses ? "addresses" : "tensor") + " tile_n=" + std::to_string(t.tile_n) +
           " stages=" + std::to_string(t.stages) + " cluster=" + std::to_string(t.cluster) +
           " sms=" + std::to_string(t.sms);
  }

  // The oracle's fp32 product. b_row and b_k: strides of B as [N][K].
  Buffer naive(const Buffer& a, int64_t a_row, int64_t a_k, const Buffer& b, int64_t b_row, int64_t b_k,
               int64_t expert_elements, int m, int n, int k, bool is_wgrad) {
    std::vector<const uint16_t*> addresses;
    for (int e = 0; e < experts_; ++e) addresses.push_back(b.as<uint16_t>() + (is_wgrad ? 0 : e * expert_elements));
    Buffer table(experts_ * 8);
    table.upload(addresses);
    const int64_t d_rows = is_wgrad ? static_cast<int64_t>(experts_) * m : rows_;
    Buffer d(d_rows * n * 4);
    d.set_bytes(0xff);
    const int m_tiles = ((is_wgrad ? m : most_) + 63) / 64;
    const int32_t flag = is_wgrad ? 1 : 0;
    if (m_tiles > 0) {
      kernels_.run(kNaive, "uniep_naive_gemm",
                   {.grid_x = (n + 63) / 64, .grid_y = m_tiles, .grid_z = experts_, .threads = 128},
                   NaiveArguments{a.as<uint16_t>(), table.as<const uint16_t*>(), d.as<float>(), start_.as<int32_t>(),
                                  count_.as<int32_t>(), a_row, a_k, b_row, b_k, m, n, k, flag});
    }
    Buffer sums(16);
    sums.set_bytes(0);
    constexpr int kSamples = 4096;
    kernels_.run("test_kernels.cu", "test_sample", {.grid_x = kSamples / 128, .threads = 128},
                 SampleArguments{d.as<float>(), a.as<uint16_t>(), table.as<const uint16_t*>(), start_.as<int32_t>(),
                                 count_.as<int32_t>(), a_row, a_k, b_row, b_k, sums.as<double>(), experts_, m, n, k,
                                 flag, kSamples});
    const auto values = sums.download<double>(2);
    const double error = values[0] == 0.0 ? 0.0 : values[0] / values[1];
    results_.record(label("naive against float64"), error < 1e-8 && error == error,
                    "relative error squared " + std::to_string(error));
    return d;
  }

  template <typename Arguments>
  void elementwise(const char* function, int64_t count, const Arguments& arguments) {
    kernels_.run(kNaive, function, {.grid_x = static_cast<int>((count + 255) / 256), .threads = 256}, arguments);
  }

  ExpertMatrices matrices(const Buffer& buffer, int64_t elements, bool addresses) const {
    ExpertMatrices w;
    if (!addresses) {
      w.base = buffer.as<void>();
    } else {
      for (int e = 0; e < experts_; ++e) w.addresses.push_back(buffer.as<uint16_t>() + e * elements);
    }
    return w;
  }

  void forward() {
    const int n = shape_.n;
    const int k = shape_.k;
    const Buffer x = random_rows(k, kNan);
    const Buffer w = random(static_cast<int64_t>(experts_) * n, k, 0.1f);
    const Buffer d = naive(x, k, 1, w, k, 1, static_cast<int64_t>(n) * k, 0, n, k, false);
    const Buffer expected(rows_ * n * 2);
    elementwise("uniep_naive_round", rows_ * n,
                NaiveEpilogueArguments{.d = d.as<float>(),
                                       .bf16 = expected.as<BFloat16>(),
                                       .segment_start = start_.as<int32_t>(),
                                       .row_count = count_.as<int32_t>(),
                                       .rows = rows_,
                                       .columns = n,
                                       .experts = experts_,
                                       .mask_rows = 1});
    for (const Variant& v : kVariants) {
      const Buffer out(rows_ * n * 2);
      out.set_bytes(0xff);
      gemm_.forward({.rows = expert_rows_,
                     .x = x.as<void>(),
                     .w = matrices(w, static_cast<int64_t>(n) * k, v.addresses),
                     .out = out.as<void>(),
                     .n = n,
                     .k = k,
                     .tuning = v.tuning});
      expect_equal("forward " + variant_name(v), out, expected, out.bytes());
    }
  }

  void dgrad() {
    const int n = shape_.n;
    const int k = shape_.k;
    const Buffer dy = random_rows(k, kNan);
    const Buffer w = random(static_cast<int64_t>(experts_) * k, n, 0.1f);
    const Buffer d = naive(dy, k, 1, w, 1, n, static_cast<int64_t>(n) * k, 0, n, k, false);
    const Buffer expected(rows_ * n * 2);
    elementwise("uniep_naive_round", rows_ * n,
                NaiveEpilogueArguments{.d = d.as<float>(),
                                       .bf16 = expected.as<BFloat16>(),
                                       .segment_start = start_.as<int32_t>(),
                                       .row_count = count_.as<int32_t>(),
                                       .rows = rows_,
                                       .columns = n,
                                       .experts = experts_,
                                       .mask_rows = 1});
    for (const Variant& v : kVariants) {
      const Buffer out(rows_ * n * 2);
      out.set_bytes(0xff);
      gemm_.input_gradient({.rows = expert_rows_,
                            .dy = dy.as<void>(),
                            .w = matrices(w, static_cast<int64_t>(n) * k, v.addresses),
                            .dx = out.as<void>(),
                            .n = n,
                            .k = k,
                            .tuning = v.tuning});
      expect_equal("dgrad " + variant_name(v), out, expected, out.bytes());
    }
  }

  void swiglu() {
    const int i = shape_.n;
    const int k = shape_.k;
    const Buffer x = random_rows(k, kNan);
    const Buffer w1 = random(static_cast<int64_t>(experts_) * 2 * i, k, 0.1f);
    const Buffer d = naive(x, k, 1, w1, k, 1, static_cast<int64_t>(2) * i * k, 0, 2 * i, k, false);
    const Buffer z(rows_ * 2 * i * 2);
    const Buffer a(rows_ * i * 2);
    elementwise("uniep_naive_activation", rows_ * i,
                NaiveEpilogueArguments{.d = d.as<float>(),
                                       .bf16 = z.as<BFloat16>(),
                                       .activation = a.as<BFloat16>(),
                                       .prob = prob_.as<float>(),
                                       .segment_start = start_.as<int32_t>(),
                                       .row_count = count_.as<int32_t>(),
                                       .rows = rows_,
                                       .columns = 2 * i,
                                       .experts = experts_,
                                       .mask_rows = 1});
    for (const Variant& v : kVariants) {
      const Buffer got_z(z.bytes());
      const Buffer got_a(a.bytes());
      got_z.set_bytes(0xff);
      got_a.set_bytes(0xff);
      const bool save = v.tuning.cluster != 1;
      gemm_.forward_swiglu({.rows = expert_rows_,
                            .x = x.as<void>(),
                            .w1 = matrices(w1, static_cast<int64_t>(2) * i * k, v.addresses),
                            .prob = prob_.as<float>(),
                            .z = save ? got_z.as<void>() : nullptr,
                            .a = got_a.as<void>(),
                            .i = i,
                            .k = k,
                            .tuning = v.tuning});
      if (save) expect_equal("swiglu z " + variant_name(v), got_z, z, z.bytes());
      expect_equal("swiglu a " + variant_name(v), got_a, a, a.bytes());
    }
  }

  void swiglu_gradient() {
    const int i = shape_.n;
    const int k = shape_.k;
    const Buffer dy = random_rows(k, kNan);
    const Buffer z = random_rows(2 * i, kNan);
    const Buffer w2 = random(static_cast<int64_t>(experts_) * k, i, 0.1f);
    const Buffer d = naive(dy, k, 1, w2, 1, i, static_cast<int64_t>(i) * k, 0, i, k, false);
    const Buffer a(rows_ * i * 2);
    const Buffer dz(rows_ * 2 * i * 2);
    const Buffer dprob(rows_ * 4);
    elementwise("uniep_naive_activation_gradient", rows_,
                NaiveEpilogueArguments{.d = d.as<float>(),
                                       .bf16 = dz.as<BFloat16>(),
                                       .activation = a.as<BFloat16>(),
                                       .saved = z.as<BFloat16>(),
                                       .prob = prob_.as<float>(),
                                       .dprob = dprob.as<float>(),
                                       .segment_start = start_.as<int32_t>(),
                                       .row_count = count_.as<int32_t>(),
                                       .rows = rows_,
                                       .columns = i,
                                       .experts = experts_,
                                       .mask_rows = 1});
    const Buffer workspace(GroupedGemm::swiglu_gradient_workspace_bytes(rows_, i));
    for (Variant v : kVariants) {
      if (v.tuning.tile_n == 256) v.tuning.tile_n = 192;
      if (v.tuning.tile_n == 192 && v.tuning.stages == 2) v.tuning.stages = 3;
      const Buffer got_a(a.bytes());
      const Buffer got_dz(dz.bytes());
      const Buffer got_dprob(dprob.bytes());
      got_a.set_bytes(0xff);
      got_dz.set_bytes(0xff);
      got_dprob.set_bytes(0xff);
      gemm_.input_gradient_swiglu({.rows = expert_rows_,
                                   .dy = dy.as<void>(),
                                   .w2 = matrices(w2, static_cast<int64_t>(i) * k, v.addresses),
                                   .z = z.as<void>(),
                                   .prob = prob_.as<float>(),
                                   .a = got_a.as<void>(),
                                   .dz = got_dz.as<void>(),
                                   .dprob = got_dprob.as<float>(),
                                   .workspace = workspace.as<void>(),
                                   .i = i,
                                   .k = k,
                                   .tuning = v.tuning});
      expect_equal("gradient a " + variant_name(v), got_a, a, a.bytes());
      expect_equal("gradient dz " + variant_name(v), got_dz, dz, dz.bytes());
      expect_equal("gradient dprob " + variant_name(v), got_dprob, dprob, dprob.bytes());
    }
  }

  void wgrad() {
    const int m = shape_.k;
    const int n = shape_.n;
    const Buffer dy = random_rows(m, 0);
    const Buffer x = random_rows(n, 0);
    const Buffer d = naive(dy, 1, m, x, 1, n, 0, m, n, 0, true);
    const int64_t elements = static_cast<int64_t>(experts_) * m * n;
    const Buffer rounded(elements * 2);
    NaiveEpilogueArguments round{.d = d.as<float>(),
                                 .bf16 = rounded.as<BFloat16>(),
                                 .rows = elements / n,
                                 .columns = n,
                                 .experts = experts_,
                                 .mask_rows = 0};
    elementwise("uniep_naive_round", elements, round);
    const Buffer start(elements * 4);
    fill(FillArguments{nullptr, start.as<float>(), elements, ++seed_, 1.0f, 1});
    const Buffer sum(elements * 4);
    copy(sum, start);
    round.bf16 = nullptr;
    round.fp32 = sum.as<float>();
    elementwise("uniep_naive_round", elements, round);
    for (const Variant& v : kVariants) {
      const Buffer out(elements * 2);
      out.set_bytes(0xff);
      gradient(v, dy, x, out, 2, WeightGradient::kBFloat16);
      expect_equal("wgrad bf16 " + variant_name(v), out, rounded, out.bytes());
      const Buffer out32(elements * 4);
      out32.set_bytes(0xff);
      gradient(v, dy, x, out32, 4, WeightGradient::kFloat32);
      expect_equal("wgrad fp32 " + variant_name(v), out32, d, out32.bytes());
      copy(out32, start);
      gradient(v, dy, x, out32, 4, WeightGradient::kMainGrad);
      expect_equal("wgrad main_grad " + variant_name(v), out32, sum, out32.bytes());
    }
  }

  void gradient(const Variant& v, const Buffer& dy, const Buffer& x, const Buffer& out, int element_bytes,
                WeightGradient form) {
    const int64_t bytes = static_cast<int64_t>(shape_.k) * shape_.n * element_bytes;
    MutableExpertMatrices dw;
    if (!v.addresses) {
      dw.base = out.as<void>();
    } else {
      for (int e = 0; e < experts_; ++e) dw.addresses.push_back(out.as<char>() + e * bytes);
    }
    gemm_.weight_gradient({.rows = expert_rows_,
                           .dy = dy.as<void>(),
                           .x = x.as<void>(),
                           .dw = dw,
                           .m = shape_.k,
                           .n = shape_.n,
                           .weight_gradient = form,
                           .tuning = v.tuning});
  }

  static void copy(const Buffer& to, const Buffer& from) {
    check(driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(to.as<void>()),
                                     reinterpret_cast<CUdeviceptr>(from.as<void>()), static_cast<size_t>(from.bytes()),
                                     nullptr),
          "cuMemcpyDtoD");
  }

  Results& results_;
  Kernels kernels_;
  GroupedGemm gemm_;
  Shape shape_;
  int experts_ = 0;
  int most_ = 0;
  int64_t rows_ = 0;
  uint64_t seed_ = 1;
  Buffer start_;
  Buffer count_;
  Buffer prob_;
  ExpertRows expert_rows_;
};

int run(int argc, char** argv) {
  Results results;
  bool large = false;
  bool tiny = false;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--large") == 0) large = true;
    if (std::strcmp(argv[i], "--tiny") == 0) tiny = true;
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
  }
  const ScopedDevice scope(0);
  const std::string path = __FILE__;
  const char* const folder = std::getenv("UNIEP_TEST_KERNELS");
  GemmTests tests(results, folder != nullptr ? folder : path.substr(0, path.rfind('/')));
  std::vector<Shape> shapes = {{{130, 0, 257}, 264, 136}};
  if (!tiny) {
    shapes = {{{128, 256}, 256, 64},
              {{130, 0, 1, 128, 257, 384, 0}, 264, 136},
              {{300, 64}, 8, 8},
              {{77, 640}, 1408, 2880},
              {{200, 0, 511}, 1856, 1408},
              {{16, 333, 250}, 512, 2048, true},
              {std::vector<int>(40, 9), 128, 200},
              {std::vector<int>(64, 9), 512, 512}};  // several tiles a CTA of one K block each
    if (large) shapes.push_back({{1000, 1100, 0, 1024}, 4096, 7168});
  }
  for (const Shape& shape : shapes) tests.run(shape, only);
  std::printf("gemm tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
