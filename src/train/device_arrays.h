#pragma once

#include <cstdint>
#include <memory>

namespace uniep::train {

// Arrays on GPUs, by whoever starts the training: the library's public interface has none that the host fills and
// reads. All functions wait until they are done.
class DeviceArrays {
 public:
  virtual ~DeviceArrays() = default;
  // `bytes` bytes on `device`, a copy of the host's `values`, or of unknown content where that is null. The memory goes
  // with its last owner.
  virtual std::shared_ptr<void> make(int device, const void* values, int64_t bytes) const = 0;
  virtual std::shared_ptr<void> make_filled(int device, unsigned char byte, int64_t bytes) const = 0;
  virtual void read(int device, const void* array, void* values, int64_t bytes) const = 0;
  // A 64-bit checksum, equal for equal bytes of one length; byte_checksum() of them on the host.
  virtual uint64_t checksum(int device, const void* array, int64_t bytes) const = 0;
};

}  // namespace uniep::train
