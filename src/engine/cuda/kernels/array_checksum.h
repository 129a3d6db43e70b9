#pragma once

#include <cstdint>

#include "engine/cuda/runtime/run_time_compiler.h"

namespace uniep::cuda {

KernelRequest checksum_request();

// What the 32-bit words of an array on a device give to a tensor's checksum (io/checksum.h), the first with this index;
// of a last word that is not whole the missing bytes count as zeros. `memory` on a 4-byte boundary. Waits until it is
// done; whatever writes the array must be over before.
uint64_t array_checksum(int device, const void* memory, int64_t bytes, uint64_t first_word);

}  // namespace uniep::cuda
