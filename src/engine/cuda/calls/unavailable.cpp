// The public functions of a library that was built without cuda.h.
#include "engine/cuda/calls/engine.h"
#include "engine/cuda/kernels/array_checksum.h"
#include "engine/cuda/runtime/device_array.h"
#include "uniep/compile.h"
#include "uniep/error.h"
#include "uniep/grouped_gemm.h"

namespace uniep {
namespace {

[[noreturn]] void refuse() {
  throw Error(Status::kUnsupported,
              "this library was built without the CUDA headers (cuda.h), so it has no cuda engine; install the CUDA "
              "toolkit's headers and build again");
}

}  // namespace

std::unique_ptr<internal::Engine> cuda::make_engine(const GroupOptions& /*options*/) {
  refuse();
}
std::string cuda::device_label(int /*device*/) {
  refuse();
}
int cuda::compute_units(int /*device*/) {
  refuse();
}
std::string cuda::speed_label(int /*device*/) {
  refuse();
}
std::string cuda::kernels_label() {
  return "no kernels";
}
std::vector<MemoryNeed> cuda::memory_need(const Machine& /*machine*/, const LayerConfig& /*config*/,
                                          const Schedule& /*schedule*/, const Placement& /*placement*/,
                                          const MemoryOptions& /*options*/) {
  refuse();
}
bool cuda::has_hopper_gpu() {
  return false;
}
int cuda::compile_calls(std::span<const CompiledCall> /*calls*/, int /*threads*/) {
  refuse();
}
std::vector<KernelFile> compile_kernels(const CompileRequest& /*request*/, const std::string& /*folder*/,
                                        int /*threads*/) {
  refuse();
}

// No group is on a device, so nobody has one of these.
namespace cuda {

DeviceArray::DeviceArray(int, int64_t) {
  refuse();
}
DeviceArray::DeviceArray(int, const void*, int64_t) {
  refuse();
}
DeviceArray::~DeviceArray() = default;
DeviceArray::DeviceArray(DeviceArray&&) noexcept = default;
DeviceArray& DeviceArray::operator=(DeviceArray&&) noexcept = default;
void DeviceArray::fill(unsigned char) const {
  refuse();
}
void DeviceArray::read_device(int, const void*, void*, int64_t) {
  refuse();
}
uint64_t array_checksum(int, const void*, int64_t, uint64_t) {
  refuse();
}
DeviceTimer::DeviceTimer(const std::vector<int>&) {
  refuse();
}
DeviceTimer::~DeviceTimer() = default;
void DeviceTimer::start() {
  refuse();
}
void DeviceTimer::stop() {
  refuse();
}
double DeviceTimer::milliseconds() {
  refuse();
}

}  // namespace cuda

struct GroupedGemm::State {};

GroupedGemm::GroupedGemm(int /*device*/) {
  refuse();
}
GroupedGemm::~GroupedGemm() = default;
int GroupedGemm::sms() const {
  refuse();
}
void GroupedGemm::forward(const ForwardGemm&) {
  refuse();
}
void GroupedGemm::forward_swiglu(const ForwardSwigluGemm&) {
  refuse();
}
void GroupedGemm::input_gradient(const InputGradientGemm&) {
  refuse();
}
int64_t GroupedGemm::swiglu_gradient_workspace_bytes(int64_t, int) {
  refuse();
}
void GroupedGemm::input_gradient_swiglu(const InputGradientSwigluGemm&) {
  refuse();
}
void GroupedGemm::weight_gradient(const WeightGradientGemm&) {
  refuse();
}
void GroupedGemm::prepare(int) {
  refuse();
}

}  // namespace uniep
