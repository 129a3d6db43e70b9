#include "engine/cuda/runtime/device_event.h"

#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {

DeviceEvent::~DeviceEvent() {
  if (event_ != nullptr) loaded_driver().cuEventDestroy(event_);
}

void DeviceEvent::record(int device, CUstream stream) {
  const ScopedDevice scope(device);
  if (event_ == nullptr) check(driver().cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  check(driver().cuEventRecord(event_, stream), "cuEventRecord");
}

void DeviceEvent::wait() const {
  check(driver().cuEventSynchronize(event_), "waiting for a device");
}

bool DeviceEvent::is_over() const {
  const CUresult result = driver().cuEventQuery(event_);
  if (result != CUDA_ERROR_NOT_READY) check(result, "waiting for a device");
  return result == CUDA_SUCCESS;
}

}  // namespace uniep::cuda
