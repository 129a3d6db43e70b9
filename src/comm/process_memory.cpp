// Symmetric memory of a process a GPU: each rank exports its allocation as a file descriptor, and maps all others'.
#include <cstring>
#include <string>
#include <utility>

#include "comm/device_wait.h"
#include "comm/memory_reclaimer.h"
#include "comm/symmetric_memory.h"
#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using cuda::check;
using cuda::driver;
using cuda::ScopedDevice;

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr double kReportSeconds = 0.5;  // for a rank to say that its own device was not done in time

CUmemLocation location_of(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

// Keeps an allocation while it is not mapped.
class Allocation {
 public:
  Allocation() = default;
  explicit Allocation(CUmemGenericAllocationHandle handle) : handle_(handle), owned_(true) {}
  ~Allocation() {
    if (owned_) driver().cuMemRelease(handle_);
  }
  Allocation(Allocation&& other) noexcept : handle_(other.handle_), owned_(std::exchange(other.owned_, false)) {}
  Allocation& operator=(Allocation&&) = delete;
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  bool owned_ = false;
};

// An allocation in this process's addresses, which its device may read and write.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Allocation& allocation, std::size_t size, int device, const char* action) : size_(size) {
    check(driver().cuMemAddressReserve(&address_, size, 0, 0, 0), action);
    try {
      check(driver().cuMemMap(address_, size, 0, allocation.handle(), 0), action);
      mapped_ = true;
      CUmemAccessDesc access{};
      access.location = location_of(device);
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      check(driver().cuMemSetAccess(address_, size, &access, 1), action);
    } catch (...) {
      release();
      throw;
    }
  }
  ~Mapping() { release(); }
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  CUdeviceptr address() const { return address_; }

 private:
  void release() {
    if (mapped_) driver().cuMemUnmap(address_, size_);
    if (address_ != 0) driver().cuMemAddressFree(address_, size_);
    mapped_ = false;
    address_ = 0;
  }
  CUdeviceptr address_ = 0;
  std::size_t size_ = 0;
  bool mapped_ = false;
};

Descriptor exported(const Allocation& allocation) {
  int number = -1;
  check(driver().cuMemExportToShareableHandle(&number, allocation.handle(), kHandleType, 0),
        "sharing memory with other processes");
  return Descriptor(number);
}

// One rank's part of the memory, as it tells the others.
struct Part {
  int64_t bytes;   // that were asked for
  int64_t size;    // of the whole allocation
  int64_t offset;  // in it
};

class ProcessMemory final : public SymmetricMemory {
 public:
  // Of its own.
  ProcessMemory(std::shared_ptr<RankMesh> mesh, int64_t bytes, int device, bool verify)
      : mesh_(std::move(mesh)), device_(device), own_ranks_{mesh_->rank()} {
    Descriptor file;
    Part own{bytes, 0, 0};
    const Problem problem = problem_in([&] {
      const ScopedDevice scope(device_);
      file = allocate(own);
    });
    mesh_->agree(problem, mesh_->wait_seconds() + kReportSeconds);
    reach_peers(own, file, reinterpret_cast<void*>(own_.address()));
    if (verify) verify_peers();
  }

  // Of the caller's.
  ProcessMemory(std::shared_ptr<RankMesh> mesh, void* base, int64_t bytes, int device)
      : mesh_(std::move(mesh)), device_(device), own_ranks_{mesh_->rank()} {
    Descriptor file;
    Part own{bytes, 0, 0};
    mesh_->agree(problem_in([&] {
      const ScopedDevice scope(device_);
      file = find(base, own);
    }));
    reach_peers(own, file, base);
  }

  ~ProcessMemory() override {
    try {
      const ScopedDevice scope(device_);
      peers_.clear();
      own_ = {};
    } catch (const Error&) {  // the device is gone, and its memory with it
    }
  }

  int ranks() const override { return mesh_->ranks(); }
  int64_t bytes() const override { return bytes_; }
  const std::vector<int>& own_ranks() const override { return own_ranks_; }
  int device(int /*own_rank*/) const override { return device_; }
  void* address(int /*own_rank*/, int peer) const override { return addresses_.at(static_cast<std::size_t>(peer)); }
  RankMesh* mesh() const override { return mesh_.get(); }

  void barrier() override {
    const double seconds = mesh_->wait_seconds();
    mesh_->agree(problem_in([&] { wait_for_device(device_, Deadline(seconds), "this rank"); }),
                 seconds + kReportSeconds);
  }

 private:
  Descriptor allocate(Part& part) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = kHandleType;
    properties.location = location_of(device_);
    std::size_t granularity = 0;
    check(driver().cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    const std::size_t size = (static_cast<std::size_t>(part.bytes) + granularity - 1) / granularity * granularity;
    CUmemGenericAllocationHandle handle = 0;
    const std::string action = "allocating " + std::to_string(size) + " bytes of symmetric memory";
    check(allocate_or_reclaim(device_, [&] { return driver().cuMemCreate(&handle, size, &properties, 0); }),
          action.c_str());
    const Allocation allocation(handle);
    own_ = Mapping(allocation, size, device_, "mapping symmetric memory");
    clear(own_.address(), size);
    part.size = static_cast<int64_t>(size);
    return exported(allocation);
  }

  // In a stream of its own: the others' may be waiting for a peer. With CUDA_DEVICE_MAX_CONNECTIONS=1 it may wait
  // behind them all the same, for as long as any call may.
  void clear(CUdeviceptr address, std::size_t size) const {
    CUstream stream = nullptr;
    check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "clearing symmetric memory");
    const std::shared_ptr<CUstream_st> owned(stream, [](CUstream own) { driver().cuStreamDestroy(own); });
    check(driver().cuMemsetD8Async(address, 0, size, stream), "clearing symmetric memory");
    wait_for_stream(stream, Deadline(mesh_->wait_seconds()), "symmetric memory to be cleared");
  }

  Descriptor find(void* base, Part& part) const {
    const auto address = reinterpret_cast<CUdeviceptr>(base);
    const auto refuse = [&](const std::string& why) {
      throw Error(Status::kInvalidArgument, "the memory of " + std::to_string(part.bytes) + " bytes at " +
                                                std::to_string(address) + " on device " + std::to_string(device_) +
                                                " can not be shared with other processes: " + why +
                                                "; it must be from Group::allocate_symmetric() or ncclMemAlloc");
    };
    CUdeviceptr first = 0;
    std::size_t size = 0;
    if (driver().cuMemGetAddressRange(&first, &size, address) != CUDA_SUCCESS) refuse("it is no device memory");
    part.offset = static_cast<int64_t>(address - first);
    part.size = static_cast<int64_t>(size);
    if (part.bytes > part.size - part.offset) {
      refuse("its allocation ends after " + std::to_string(part.size - part.offset) + " bytes");
    }
    CUmemGenericAllocationHandle handle = 0;
    if (driver().cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(first)) != CUDA_SUCCESS) {
      refuse("it is from cudaMalloc or the like");
    }
    const Allocation allocation(handle);
    int number = -1;
    if (driver().cuMemExportToShareableHandle(&number, handle, kHandleType, 0) != CUDA_SUCCESS) {
      refuse("it was allocated without a handle for that");
    }
    return Descriptor(number);
  }

  // The second step, when all ranks have their own part.
  void reach_peers(const Part& own, const Descriptor& file, void* own_address) {
    std::vector<Part> parts;
    for (const std::vector<std::byte>& told : mesh_->all_gather(std::as_bytes(std::span(&own, 1)))) {
      if (told.size() != sizeof(Part)) throw Error(Status::kInternal, "a rank tells another size of its memory's part");
      std::memcpy(&parts.emplace_back(), told.data(), sizeof(Part));
    }
    bytes_ = parts.front().size - parts.front().offset;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      bytes_ = std::min(bytes_, parts[rank].size - parts[rank].offset);
      if (parts[rank].bytes == parts.front().bytes) continue;
      throw Error(Status::kInvalidArgument, "symmetric memory: rank " + std::to_string(rank) + " asks for " +
                                                std::to_string(parts[rank].bytes) + " bytes, rank 0 for " +
                                                std::to_string(parts.front().bytes) + "; must be equal on all ranks");
    }
    if (own_.address() == 0) bytes_ = own.bytes;  // what lies behind it is not the caller's to share
    const std::vector<Descriptor> files = mesh_->all_gather_descriptors(file.number());
    mesh_->agree(problem_in([&] {
      const ScopedDevice scope(device_);
      for (int peer = 0; peer < ranks(); ++peer) {
        const auto of = static_cast<std::size_t>(peer);
        addresses_.push_back(peer == mesh_->rank() ? own_address : reach(peer, files[of], parts[of]));
      }
    }));
  }

  void* reach(int peer, const Descriptor& file, const Part& part) {
    const std::string action = "mapping the memory of rank " + std::to_string(peer);
    CUmemGenericAllocationHandle handle = 0;
    auto* const number = reinterpret_cast<void*>(static_cast<uintptr_t>(file.number()));
    check(driver().cuMemImportFromShareableHandle(&handle, number, kHandleType), action.c_str());
    const Allocation allocation(handle);
    peers_.emplace_back(allocation, static_cast<std::size_t>(part.size), device_, action.c_str());
    return reinterpret_cast<void*>(peers_.back().address() + static_cast<CUdeviceptr>(part.offset));
  }

  // Each rank leaves its number at the start of its memory and reads all others'.
  void verify_peers() {
    mesh_->agree(problem_in([&] {
      const int32_t mine = mesh_->rank() + 1;
      const ScopedDevice scope(device_);
      check(driver().cuMemcpyHtoDAsync(own_.address(), &mine, sizeof(mine), nullptr), "writing this rank's number");
      wait_for_device(device_, Deadline(mesh_->wait_seconds()), "this rank's number to be written");
    }));
    mesh_->agree(problem_in([&] {
      const ScopedDevice scope(device_);
      for (int peer = 0; peer < ranks(); ++peer) {
        const auto address = reinterpret_cast<CUdeviceptr>(this->address(mesh_->rank(), peer));
        int32_t seen = 0;
        check(driver().cuMemcpyDtoHAsync(&seen, address, sizeof(seen), nullptr), "reading a peer's number");
        wait_for_device(device_, Deadline(mesh_->wait_seconds()), "a peer's number to be read");
        if (seen == peer + 1) continue;
        throw Error(Status::kInternal, "finds number " + std::to_string(seen - 1) + " where rank " +
                                           std::to_string(peer) + "'s memory should be");
      }
    }));
    mesh_->agree(problem_in([&] {
      const ScopedDevice scope(device_);
      clear(own_.address(), sizeof(int32_t));
    }));
  }

  const std::shared_ptr<RankMesh> mesh_;
  const int device_;
  const std::vector<int> own_ranks_;
  int64_t bytes_ = 0;
  Mapping own_;  // none where it is the caller's
  std::vector<Mapping> peers_;
  std::vector<void*> addresses_;  // by rank
};

void require_bytes(int64_t bytes) {
  if (bytes <= 0) {
    throw Error(Status::kInvalidArgument, "symmetric memory of " + std::to_string(bytes) + " bytes; must be positive");
  }
}

}  // namespace

std::unique_ptr<SymmetricMemory> make_process_memory(std::shared_ptr<RankMesh> mesh, int64_t bytes, int device,
                                                     bool verify) {
  require_bytes(bytes);
  return std::make_unique<ProcessMemory>(std::move(mesh), bytes, device, verify);
}

std::unique_ptr<SymmetricMemory> share_memory(std::shared_ptr<RankMesh> mesh, void* base, int64_t bytes, int device) {
  require_bytes(bytes);
  return std::make_unique<ProcessMemory>(std::move(mesh), base, bytes, device);
}

}  // namespace uniep
