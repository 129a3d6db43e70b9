// The public functions of a library that was built without cuda.h.
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

struct GroupedGemm::State {};

GroupedGemm::GroupedGemm(int /*device*/) {
  refuse();
}
GroupedGemm::~GroupedGemm() = default;
int GroupedGemm::sms() const {
  refuse();
}
void GroupedGemm::forward(const ExpertRows&, const void*, const ExpertMatrices&, void*, int, int, void*,
                          const GemmTuning&) {
  refuse();
}
void GroupedGemm::forward_swiglu(const ExpertRows&, const void*, const ExpertMatrices&, const float*, void*, void*, int,
                                 int, void*, const GemmTuning&) {
  refuse();
}
void GroupedGemm::input_gradient(const ExpertRows&, const void*, const ExpertMatrices&, void*, int, int, void*,
                                 const GemmTuning&) {
  refuse();
}
int64_t GroupedGemm::swiglu_gradient_workspace_bytes(int64_t, int) {
  refuse();
}
void GroupedGemm::input_gradient_swiglu(const ExpertRows&, const void*, const ExpertMatrices&, const void*,
                                        const float*, void*, void*, float*, void*, int, int, void*, const GemmTuning&) {
  refuse();
}
void GroupedGemm::weight_gradient(const ExpertRows&, const void*, const void*, const MutableExpertMatrices&, int, int,
                                  WeightGradientMode, void*, const GemmTuning&) {
  refuse();
}
void GroupedGemm::prepare(int) {
  refuse();
}

}  // namespace uniep
