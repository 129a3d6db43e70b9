#include "cli/device_arrays.h"

#include "engine/cuda/kernels/array_checksum.h"
#include "engine/cuda/runtime/device_array.h"

namespace uniep::cli {
namespace {

class CudaArrays : public train::DeviceArrays {
 public:
  std::shared_ptr<void> make(int device, const void* values, int64_t bytes) const override {
    const auto array = values == nullptr ? std::make_shared<cuda::DeviceArray>(device, bytes)
                                         : std::make_shared<cuda::DeviceArray>(device, values, bytes);
    return {array, array->data()};
  }
  std::shared_ptr<void> make_filled(int device, unsigned char byte, int64_t bytes) const override {
    const auto array = std::make_shared<cuda::DeviceArray>(device, bytes);
    array->fill(byte);
    return {array, array->data()};
  }
  void read(int device, const void* array, void* values, int64_t bytes) const override {
    cuda::DeviceArray::read_device(device, array, values, bytes);
  }
  uint64_t checksum(int device, const void* array, int64_t bytes) const override {
    return cuda::array_checksum(device, array, bytes, 0);
  }
};

}  // namespace

const train::DeviceArrays& device_arrays() {
  static const CudaArrays arrays;
  return arrays;
}

}  // namespace uniep::cli
