// The GPUs of a library that was built without cuda.h: none.
#include "cli/bench_gpus.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

[[noreturn]] void refuse_without_headers() {
  throw Error(Status::kDevice,
              "this program was built without the CUDA headers (cuda.h), so it has no cuda engine; install "
              "the CUDA toolkit's headers and build again");
}

}  // namespace

struct BenchGpus::Gpu {};
class BenchGpus::Gate {};

BenchGpus::BenchGpus(const std::vector<int>&, double) {
  refuse_without_headers();
}
BenchGpus::~BenchGpus() = default;
void BenchGpus::require(const std::vector<int>&) {
  refuse_without_headers();
}
std::size_t BenchGpus::count() const {
  refuse_without_headers();
}
std::string BenchGpus::name() const {
  refuse_without_headers();
}
void* BenchGpus::zeros(std::size_t, int64_t) {
  refuse_without_headers();
}
void* BenchGpus::random_bfloat16(std::size_t, int64_t, float) {
  refuse_without_headers();
}
void* BenchGpus::copy_of(std::size_t, const void*, int64_t) {
  refuse_without_headers();
}
double BenchGpus::time(const std::function<void()>&, Start) {
  refuse_without_headers();
}
std::vector<double> BenchGpus::time_cold(const std::function<void()>&, int, Start) {
  refuse_without_headers();
}
std::vector<std::vector<double>> BenchGpus::time_on_host_in_turn(const std::vector<std::function<void()>>&, int) {
  refuse_without_headers();
}
std::vector<std::vector<double>> BenchGpus::time_cold_in_turn(const std::vector<Work>&, int) {
  refuse_without_headers();
}
std::vector<std::vector<double>> BenchGpus::time_in_turn(const std::vector<Work>&, int) {
  refuse_without_headers();
}
void BenchGpus::synchronize() {
  refuse_without_headers();
}

}  // namespace uniep::cli
