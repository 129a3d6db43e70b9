#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/symmetric_memory.h"
#include "uniep/group.h"

namespace uniep::cuda {

// Throws uniep::Error (kUnsupported) where a group can not have so many ranks.
void require_ranks_of_group(int ranks);

// Which ranks this process drives, and the device of each.
class RankDevices {
 public:
  // With a process a GPU: meets the other ranks. Throws Error that names the option or the rank at fault.
  explicit RankDevices(const GroupOptions& options);

  int first_local() const { return first_local_; }
  int local_count() const { return static_cast<int>(devices_.size()); }
  int device_of(int rank) const { return devices_.at(static_cast<std::size_t>(rank - first_local_)); }
  const std::vector<int>& devices() const { return devices_; }  // of local ranks

  // Local ranks by device, in the order in which devices first appear.
  struct OfDevice {
    int device;
    std::vector<int> ranks;
  };
  const std::vector<OfDevice>& by_device() const { return by_device_; }

  // SMs that every rank can have; even, so that they come in clusters.
  int most_workers() const;

  // New memory every time. Collective.
  std::unique_ptr<SymmetricMemory> make_memory(int64_t bytes) const;
  // Collective. The same of memory that each rank has.
  std::unique_ptr<SymmetricMemory> share_memory(std::span<void* const> memory, int64_t bytes) const;

  // Exchanges of hosts; nothing where this process has all ranks.
  void meet() const;
  // Behind a failure that not all ranks may have seen: ends the exchanges that the others are in.
  void begin_again() const;
  // Whether this rank is to begin again: another one waits for that, or has refused a call that this one was in.
  bool is_awaited() const;
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own) const;
  void fail(const std::string& why) const noexcept;
  // Ends the exchanges of that call that others are in.
  void refuse_call(uint32_t call, const std::string& why) const noexcept;
  // Why the ranks can not go on together; empty: nothing is known. Does not wait.
  std::string peer_failure() const { return mesh_ != nullptr ? mesh_->peer_failure() : ""; }

  // To the other ranks' processes; null where this process drives all ranks.
  const std::shared_ptr<RankMesh>& mesh() const { return mesh_; }

 private:
  uniep::Launch launch_;
  int first_local_ = 0;
  std::vector<int> devices_;
  std::vector<OfDevice> by_device_;
  double wait_seconds_;  // for peers that have not begun
  std::shared_ptr<RankMesh> mesh_;
  mutable bool verified_ = false;  // that peers' memory is theirs
};

}  // namespace uniep::cuda
