#include "engine/cuda/layer/rank_devices.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "engine/cuda/device/rank_call.h"
#include "engine/cuda/driver.h"

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

NcclBootstrap bootstrap_of(const GroupOptions& options, const std::vector<int>& devices) {
  NcclBootstrap bootstrap;
  if (options.communicator == nullptr && options.bootstrap.empty()) {
    bootstrap = nccl_bootstrap_from_environment();
    if (bootstrap.ranks != options.ranks) {
      refuse(fmt::format("ranks: {}; the environment says WORLD_SIZE={}", options.ranks, bootstrap.ranks));
    }
    if (options.devices.empty()) {
      if (std::find(devices.begin(), devices.end(), bootstrap.device) == devices.end()) {
        refuse(fmt::format("LOCAL_RANK: {}; there are {} GPUs here", bootstrap.device, devices.size()));
      }
      return bootstrap;
    }
  } else {
    bootstrap.rank = options.rank;
    bootstrap.ranks = options.ranks;
    bootstrap.unique_id = options.bootstrap;
    bootstrap.communicator = options.communicator;
  }
  bootstrap.device = devices[static_cast<std::size_t>(bootstrap.rank) % devices.size()];
  return bootstrap;
}

}  // namespace

RankDevices::RankDevices(const GroupOptions& options) : launch_(options.launch) {
  if (options.ranks > kMostCudaRanks) {
    throw Error(Status::kUnsupported,
                fmt::format("ranks: {}; the cuda engine runs 1 to {}", options.ranks, kMostCudaRanks));
  }
  const std::vector<int> devices = usable_devices(options);
  if (launch_ == uniep::Launch::kProcesses) {
    if (options.rank < 0 || options.rank >= options.ranks) {
      refuse(fmt::format("rank: {}; must be 0 to {}", options.rank, options.ranks - 1));
    }
    bootstrap_ = bootstrap_of(options, devices);
    first_local_ = bootstrap_.rank;
    devices_ = {bootstrap_.device};
    by_device_ = {{bootstrap_.device, {bootstrap_.rank}}};
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
  if (launch_ == uniep::Launch::kProcesses) return make_nccl_symmetric_memory(bootstrap_, bytes);
  return make_local_symmetric_memory(devices_, bytes);
}

}  // namespace uniep::cuda
