#include "comm/device_wait.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using cuda::driver;

template <typename Query>
void poll(Query&& query, const Deadline& deadline, const char* what) {
  constexpr int kBusyLooks = 2000;  // most waits are short
  for (int looks = 0;; ++looks) {
    const bool last = deadline.passed();
    const CUresult result = query();
    if (result != CUDA_ERROR_NOT_READY) {
      cuda::check(result, (std::string("waiting for ") + what).c_str());
      return;
    }
    if (last) {
      throw Error(Status::kTimeout,
                  std::string("waiting for ") + what + ": its device was not done within " + deadline.text());
    }
    if (looks > kBusyLooks) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

void wait_for_device(int device, const Deadline& deadline, const char* what) {
  const cuda::ScopedDevice scope(device);
  CUevent event = nullptr;
  cuda::check(driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "making an event");
  const std::shared_ptr<CUevent_st> owned(event, [](CUevent own) { driver().cuEventDestroy(own); });
  cuda::check(driver().cuEventRecord(event, nullptr), "recording an event");
  poll([event] { return driver().cuEventQuery(event); }, deadline, what);
}

void wait_for_stream(CUstream stream, const Deadline& deadline, const char* what) {
  poll([stream] { return driver().cuStreamQuery(stream); }, deadline, what);
}

}  // namespace uniep
