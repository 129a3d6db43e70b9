#include "engine/cuda/calls/rank_devices.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "comm/bootstrap.h"
#include "comm/communicator_id.h"
#include "engine/cuda/device/arguments/rank_call.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/kernel_cache.h"

namespace uniep::cuda {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

// What was given, or all there are.
std::vector<int> usable_devices(const GroupOptions& options) {
  const int count = device_count();
  std::vector<int> devices = options.devices;
  for (int device = 0; options.devices.empty() && device < count; ++device) devices.push_back(device);
  if (devices.empty()) throw Error(Status::kUnsupported, "devices: this machine has no GPU");
  for (const int device : devices) {
    if (device < 0 || device >= count) refuse(fmt::format("devices: {}; there are {} GPUs", device, count));
    require_hopper(device);
  }
  return devices;
}

struct OwnRank {
  MeshBootstrap bootstrap;
  int device;
};

int device_of_rank(int rank, const std::vector<int>& devices) {
  return devices[static_cast<std::size_t>(rank) % devices.size()];
}

// In torchrun's environment.
OwnRank own_rank_of_environment(const GroupOptions& options, const std::vector<int>& devices) {
  const RankEnvironment environment = required_rank_environment();
  if (environment.ranks != options.ranks) {
    refuse(fmt::format("ranks: {}; the environment says WORLD_SIZE={}", options.ranks, environment.ranks));
  }
  if (options.rank != 0 && options.rank != environment.rank) {
    refuse(fmt::format("rank: {}; the environment says RANK={}, which counts without a unique id or a communicator",
                       options.rank, environment.rank));
  }
  const MeshBootstrap bootstrap{environment.rank, environment.ranks, environment.name};
  if (!options.devices.empty()) return {bootstrap, device_of_rank(environment.rank, devices)};
  if (std::find(devices.begin(), devices.end(), environment.local_rank) == devices.end()) {
    refuse(fmt::format("LOCAL_RANK: {}; there are {} GPUs here", environment.local_rank, devices.size()));
  }
  return {bootstrap, environment.local_rank};
}

OwnRank own_rank_of(const GroupOptions& options, const std::vector<int>& devices) {
  if (options.communicator == nullptr && options.bootstrap.empty()) return own_rank_of_environment(options, devices);
  OwnRank own{{options.rank, options.ranks, {}}, device_of_rank(options.rank, devices)};
  std::string id = options.bootstrap;
  if (options.communicator != nullptr) {
    MeshBootstrap& given = own.bootstrap;
    id = share_unique_id_over(options.communicator, own.device, given.rank, given.ranks,
                              options.arrival_timeout_seconds);
    if (given.ranks != options.ranks || given.rank != options.rank) {
      refuse(fmt::format("rank: {} of {}; the communicator says {} of {}", options.rank, options.ranks, given.rank,
                         given.ranks));
    }
  }
  own.bootstrap.name = name_of_unique_id(id);
  return own;
}

// What one process's ranks have each, and all of them reach.
class CallersMemory final : public SymmetricMemory {
 public:
  CallersMemory(const std::vector<int>& devices, std::span<void* const> memory, int64_t bytes)
      : devices_(devices), addresses_(memory.begin(), memory.end()), bytes_(bytes) {
    for (std::size_t rank = 0; rank < devices.size(); ++rank) own_ranks_.push_back(static_cast<int>(rank));
  }
  int ranks() const override { return static_cast<int>(devices_.size()); }
  int64_t bytes() const override { return bytes_; }
  const std::vector<int>& own_ranks() const override { return own_ranks_; }
  int device(int own_rank) const override { return devices_.at(static_cast<std::size_t>(own_rank)); }
  void* address(int /*own_rank*/, int peer) const override { return addresses_.at(static_cast<std::size_t>(peer)); }
  void barrier() override {}

 private:
  std::vector<int> devices_, own_ranks_;
  std::vector<void*> addresses_;
  int64_t bytes_;
};

}  // namespace

void require_ranks_of_group(int ranks) {
  if (ranks >= 1 && ranks <= kMaxCudaRanks) return;
  throw Error(Status::kUnsupported, fmt::format("ranks: {}; the cuda engine runs 1 to {}", ranks, kMaxCudaRanks));
}

RankDevices::RankDevices(const GroupOptions& options)
    : launch_(options.launch), wait_seconds_(options.arrival_timeout_seconds) {
  require_ranks_of_group(options.ranks);
  const std::vector<int> devices = usable_devices(options);
  if (launch_ == uniep::Launch::kProcesses) {
    if (options.rank < 0 || options.rank >= options.ranks) {
      cuda::refuse(fmt::format("rank: {}; must be 0 to {}", options.rank, options.ranks - 1));
    }
    OwnRank own = own_rank_of(options, devices);
    own.bootstrap.kernels = cuda::sources_label();
    first_local_ = own.bootstrap.rank;
    devices_ = {own.device};
    by_device_ = {{own.device, {first_local_}}};
    mesh_ = std::make_shared<RankMesh>(own.bootstrap, wait_seconds_, wait_seconds_);
    return;
  }
  for (int rank = 0; rank < options.ranks; ++rank) {
    const int device = devices[static_cast<std::size_t>(rank) % devices.size()];
    devices_.push_back(device);
    auto found =
        std::find_if(by_device_.begin(), by_device_.end(), [&](const OfDevice& of) { return of.device == device; });
    if (found == by_device_.end()) found = by_device_.insert(by_device_.end(), {device, {}});
    found->ranks.push_back(rank);
  }
}

int RankDevices::most_workers() const {
  int most = 0;
  for (const OfDevice& of : by_device_) {
    const int processors = device_attribute(of.device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    const int share = processors / static_cast<int>(of.ranks.size()) / 2 * 2;
    most = most == 0 ? share : std::min(most, share);
  }
  return most;
}

std::unique_ptr<SymmetricMemory> RankDevices::make_memory(int64_t bytes) const {
  if (launch_ == uniep::Launch::kThreads) return make_local_symmetric_memory(devices_, bytes, wait_seconds_);
  auto memory = make_process_memory(mesh_, bytes, devices_.front(), !verified_);
  verified_ = true;
  return memory;
}

std::unique_ptr<SymmetricMemory> RankDevices::share_memory(std::span<void* const> memory, int64_t bytes) const {
  if (launch_ == uniep::Launch::kThreads) return std::make_unique<CallersMemory>(devices_, memory, bytes);
  return uniep::share_memory(mesh_, memory.front(), bytes, devices_.front());
}

void RankDevices::meet() const {
  if (mesh_ != nullptr) mesh_->barrier();
}

void RankDevices::begin_again() const {
  if (mesh_ != nullptr) mesh_->begin_again();
}

bool RankDevices::is_awaited() const {
  return mesh_ != nullptr && mesh_->awaiting_rank() >= 0;
}

std::vector<std::vector<std::byte>> RankDevices::all_gather(std::span<const std::byte> own) const {
  return mesh_->all_gather(own);
}

void RankDevices::fail(const std::string& why) const noexcept {
  if (mesh_ != nullptr) mesh_->fail(why);
}

void RankDevices::refuse_call(uint32_t call, const std::string& why) const noexcept {
  if (mesh_ != nullptr) mesh_->refuse(call, why);
}

}  // namespace uniep::cuda
