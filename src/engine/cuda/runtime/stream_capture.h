#pragma once

#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {

// Whether what is queued on a stream goes into a CUDA graph.
inline bool is_captured(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// The capture that a stream is in; 0: none.
inline uint64_t capture_of(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  check(driver().cuStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr),
        "cuStreamGetCaptureInfo");
  return status == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : id;
}

// While it lives, this thread may take memory and use streams that are not captured though others are.
class BesideCapture {
 public:
  BesideCapture() { check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode"); }
  ~BesideCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace uniep::cuda
