#pragma once

// Where a GPU has no memory left: what the process caches for itself there, such as a framework's allocator, may be had
// (set_memory_reclaimer() of uniep/group.h).
namespace uniep {

// Asks for memory of a device back; false where nobody gives any.
bool reclaim_memory(int device);

// What `allocate` gives, a CUresult of taking memory of a device, at its second attempt if there was no room at the
// first.
template <typename Allocate>
auto allocate_or_reclaim(int device, Allocate allocate) {
  constexpr int kNoRoom = 2;  // CUDA_ERROR_OUT_OF_MEMORY
  const auto first = allocate();
  return static_cast<int>(first) == kNoRoom && reclaim_memory(device) ? allocate() : first;
}

}  // namespace uniep
