#pragma once

#include <cstddef>
#include <memory>

#include "uniep/export.h"

namespace uniep {

namespace internal {
class SymmetricBlock;
}

// Memory of every rank of a Group that the kernels of all its ranks reach (Group::allocate_symmetric,
// Group::register_symmetric). An x that lies in one is read there by the other ranks; any other x is first copied, on
// the device, where a process holds one rank. All ranks of a call give an x at the same offset of the same buffer, or
// none of them does. Cheap to copy; the memory goes, or is no longer reached, with the last copy. Must not outlive the
// Group, nor go while a call that reads it is running.
class UNIEP_API SymmetricBuffer {
 public:
  SymmetricBuffer() = default;
  explicit SymmetricBuffer(std::shared_ptr<internal::SymmetricBlock> block) : block_(std::move(block)) {}
  bool empty() const { return block_ == nullptr; }

  void* data(int rank) const;  // of a local rank
  std::size_t bytes() const;   // of each rank

 private:
  std::shared_ptr<internal::SymmetricBlock> block_;
};

}  // namespace uniep
