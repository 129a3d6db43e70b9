#pragma once

#include "engine/cuda/driver.h"

namespace uniep::cuda {

// Whether what is queued on a stream goes into a CUDA graph.
inline bool is_captured(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
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
