#pragma once

namespace uniep::cuda {

// Whether kernels of `device` may read an address of another device's memory. Peer access between the two is on, which
// is enough for memory of cudaMalloc; pools and mapped memory (PyTorch's expandable segments, say) have rights of their
// own.
bool can_read(int device, const void* address);

}  // namespace uniep::cuda
