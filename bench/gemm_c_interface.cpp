// A C interface to the grouped GEMMs for bench/compare.py, so that the other library's calls and ours alternate in one
// process on the same memory. Returns 0, or 1 with gemm_error()'s text.
#include <exception>
#include <memory>
#include <string>

#include "uniep/grouped_gemm.h"

namespace {

std::string last_error;
std::unique_ptr<uniep::GroupedGemm> gemm;
uniep::GemmTuning tuning;

template <typename Action>
int guarded(const Action& action) {
  try {
    if (gemm == nullptr) gemm = std::make_unique<uniep::GroupedGemm>(0);
    action();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

uniep::ExpertRows expert_rows(int experts, long long rows, const int* start, const int* count) {
  return {experts, rows, start, count};
}

}  // namespace

extern "C" {

const char* gemm_error() {
  return last_error.c_str();
}

void gemm_tune(int tile_n, int stages, int cluster, int raster, int sms) {
  tuning = {tile_n, stages, cluster, raster, sms};
}

int gemm_prepare() {
  return guarded([] { gemm->prepare(); });
}

int gemm_forward(int experts, long long rows, const int* start, const int* count, const void* x, const void* w,
                 void* out, int n, int k, void* stream) {
  return guarded([&] {
    gemm->forward(expert_rows(experts, rows, start, count), x, {w, {}}, out, n, k, stream, tuning);
  });
}

int gemm_forward_swiglu(int experts, long long rows, const int* start, const int* count, const void* x, const void* w1,
                        const float* prob, void* z, void* a, int i, int k, void* stream) {
  return guarded([&] {
    gemm->forward_swiglu(expert_rows(experts, rows, start, count), x, {w1, {}}, prob, z, a, i, k, stream, tuning);
  });
}

int gemm_input_gradient(int experts, long long rows, const int* start, const int* count, const void* dy, const void* w,
                        void* dx, int n, int k, void* stream) {
  return guarded([&] {
    gemm->input_gradient(expert_rows(experts, rows, start, count), dy, {w, {}}, dx, n, k, stream, tuning);
  });
}

int gemm_input_gradient_swiglu(int experts, long long rows, const int* start, const int* count, const void* dy,
                               const void* w2, const void* z, const float* prob, void* a, void* dz, float* dprob,
                               void* workspace, int i, int k, void* stream) {
  return guarded([&] {
    gemm->input_gradient_swiglu(expert_rows(experts, rows, start, count), dy, {w2, {}}, z, prob, a, dz, dprob,
                                workspace, i, k, stream, tuning);
  });
}

int gemm_weight_gradient(int experts, long long rows, const int* start, const int* count, const void* dy, const void* x,
                         void* dw, int m, int n, int mode, void* stream) {
  return guarded([&] {
    gemm->weight_gradient(expert_rows(experts, rows, start, count), dy, x, {dw, {}}, m, n,
                          static_cast<uniep::WeightGradientMode>(mode), stream, tuning);
  });
}
}
