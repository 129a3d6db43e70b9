#include "engine/cuda/runtime/profiler_range.h"

#if __has_include(<nvtx3/nvToolsExt.h>)

#include <nvtx3/nvToolsExt.h>

namespace uniep::cuda {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("uniep");
  return domain;
}

}  // namespace

ProfilerRange::ProfilerRange(const char* name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

ProfilerRange::~ProfilerRange() {
  nvtxDomainRangePop(domain());
}

}  // namespace uniep::cuda

#else

namespace uniep::cuda {

ProfilerRange::ProfilerRange(const char*) {}
ProfilerRange::~ProfilerRange() = default;

}  // namespace uniep::cuda

#endif
