#include "engine/cuda/kernels/array_checksum.h"

#include <algorithm>

#include "engine/cuda/device/arguments/checksum_arguments.h"
#include "engine/cuda/runtime/device_array.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/kernel.h"

namespace uniep::cuda {

KernelRequest checksum_request() {
  return {"engine/cuda/device/kernels/checksum.cu", "uniep_checksum", {}};
}

uint64_t array_checksum(int device, const void* memory, int64_t bytes, uint64_t first_word) {
  if (bytes == 0) return 0;
  const DeviceArray sum(device, sizeof(uint64_t));
  sum.fill(0);
  ChecksumArguments arguments{memory, bytes, first_word, static_cast<unsigned long long*>(sum.data())};
  constexpr int64_t kMostCtas = 1024, kWordsOfThread = 16;
  const int64_t words = (bytes + 3) / 4;
  const int64_t ctas = (words + kChecksumThreads * kWordsOfThread - 1) / (kChecksumThreads * kWordsOfThread);
  const ScopedDevice scope(device);
  launch_kernel(KernelStore::of_device(device).get(checksum_request(), 0),
                {.grid_x = static_cast<int>(std::min(ctas, kMostCtas)), .threads = kChecksumThreads}, &arguments,
                "launching a checksum");
  uint64_t value = 0;
  sum.read(&value, sizeof(value));
  return value;
}

}  // namespace uniep::cuda
