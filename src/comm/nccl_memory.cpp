#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "comm/nccl_library.h"
#include "comm/rank_environment.h"
#include "comm/symmetric_memory.h"
#include "engine/cuda/driver.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using cuda::check;
using cuda::driver;
using cuda::ScopedDevice;

// The start of a window as NCCL 2.28 keeps it in device memory (nccl_device/impl/core__types.h).
struct WindowOf228 {
  void* host;
  char* flat_base;  // the first byte of rank 0
  int lsa_rank;
  int world_rank;
  uint32_t stride_4g;  // from one rank to the next, in units of 4 GiB
};
constexpr int kFirstWithoutThatLayout = 22900;

class NcclMemory final : public SymmetricMemory {
 public:
  NcclMemory(const NcclBootstrap& bootstrap, int64_t bytes)
      : rank_(bootstrap.rank), ranks_(bootstrap.ranks), device_(bootstrap.device), own_ranks_{bootstrap.rank} {
    const ScopedDevice scope(device_);
    try {
      join(bootstrap);
      check(driver().cuMemAlloc(&word_, sizeof(int32_t)), "allocating the barrier's word");
      take(bytes);
    } catch (...) {
      release(true);
      throw;
    }
  }
  ~NcclMemory() override {
    const ScopedDevice scope(device_);
    release(abandoned_ || std::uncaught_exceptions() > exceptions_);
  }

  int ranks() const override { return ranks_; }
  int64_t bytes() const override { return bytes_; }
  const std::vector<int>& own_ranks() const override { return own_ranks_; }
  int device(int /*own_rank*/) const override { return device_; }
  void* address(int /*own_rank*/, int peer) const override { return peers_.at(static_cast<size_t>(peer)); }

  void resize(int64_t bytes) {
    barrier();
    const ScopedDevice scope(device_);
    release_window();
    take(bytes);
  }

  void barrier() override {
    const ScopedDevice scope(device_);
    check(driver().cuCtxSynchronize(), "waiting for this rank");
    check_nccl(nccl().all_reduce(reinterpret_cast<void*>(word_), reinterpret_cast<void*>(word_), 1, Nccl::kInt32,
                                 Nccl::kSum, communicator_, nullptr),
               "ncclAllReduce");
    check(driver().cuCtxSynchronize(), "waiting for the other ranks");
  }

  void abandon() { abandoned_ = true; }

 private:
  CUdeviceptr own() const { return reinterpret_cast<CUdeviceptr>(own_); }

  void take(int64_t bytes) {
    constexpr int64_t kAlignment = 4096;
    bytes_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    check_nccl(nccl().memory_allocate(&own_, static_cast<size_t>(bytes_)), "ncclMemAlloc");
    check(driver().cuMemsetD8Async(own(), 0, static_cast<size_t>(bytes_), nullptr), "clearing symmetric memory");
    check(driver().cuCtxSynchronize(), "clearing symmetric memory");
    if (ranks_ == 1) {  // there is no peer, so no need for a window; one has been seen that could not be read
      peers_ = {own_};
      return;
    }
    check_nccl(
        nccl().register_window(communicator_, own_, static_cast<size_t>(bytes_), &window_, Nccl::kSymmetricWindow),
        "ncclCommWindowRegister");
    if (window_ == nullptr) {
      throw Error(Status::kUnsupported, "NCCL gave no symmetric window: are all ranks within NVLink's reach?");
    }
    find_peers();
    verify_peers();
  }

  void join(const NcclBootstrap& bootstrap) {
    if (bootstrap.communicator != nullptr) {
      communicator_ = bootstrap.communicator;
      check_nccl(nccl().rank_of(communicator_, &rank_), "ncclCommUserRank");
      check_nccl(nccl().count_of(communicator_, &ranks_), "ncclCommCount");
      own_ranks_ = {rank_};
      return;
    }
    Nccl::UniqueId id{};
    if (bootstrap.unique_id.empty()) {
      // NCCL_COMM_ID (host:port) makes every rank's id the same.
      check_nccl(nccl().get_unique_id(&id), "ncclGetUniqueId");
    } else if (bootstrap.unique_id.size() == sizeof(id.bytes)) {
      std::memcpy(id.bytes, bootstrap.unique_id.data(), sizeof(id.bytes));
    } else {
      throw Error(Status::kInvalidArgument,
                  "unique_id has " + std::to_string(bootstrap.unique_id.size()) + " bytes: ncclGetUniqueId gives 128");
    }
    check_nccl(nccl().init_rank(&communicator_, ranks_, id, rank_), "ncclCommInitRank");
    owns_communicator_ = true;
  }

  void find_peers() {
    WindowOf228 window{};
    if (nccl().lsa_device_pointer == nullptr) {
      if (nccl().version >= kFirstWithoutThatLayout) {
        throw Error(Status::kUnsupported, "NCCL " + std::to_string(nccl().version) +
                                              " has no ncclGetLsaDevicePointer: peers' addresses can not be found");
      }
      check(driver().cuMemcpyDtoHAsync(&window, reinterpret_cast<CUdeviceptr>(window_), sizeof(window), nullptr),
            "reading NCCL's window");
      check(driver().cuCtxSynchronize(), "reading NCCL's window");
      if (window.world_rank != rank_ || window.lsa_rank != rank_) {
        throw Error(Status::kUnsupported, "not all ranks of this group are within NVLink's reach of each other");
      }
    }
    peers_.clear();
    for (int peer = 0; peer < ranks_; ++peer) {
      void* address = nullptr;
      if (nccl().lsa_device_pointer != nullptr) {
        check_nccl(nccl().lsa_device_pointer(window_, 0, peer, &address), "ncclGetLsaDevicePointer");
      } else {
        address = window.flat_base + (static_cast<uint64_t>(window.stride_4g) << 32) * static_cast<uint64_t>(peer);
      }
      peers_.push_back(address);
    }
  }

  // Each rank leaves its number at the start of its memory and reads all others'.
  void verify_peers() {
    const int32_t mine = rank_ + 1;
    check(driver().cuMemcpyHtoDAsync(own(), &mine, sizeof(mine), nullptr), "writing this rank's number");
    barrier();
    for (int peer = 0; peer < ranks_; ++peer) {
      int32_t seen = 0;
      check(driver().cuMemcpyDtoHAsync(&seen, reinterpret_cast<CUdeviceptr>(peers_[static_cast<size_t>(peer)]),
                                       sizeof(seen), nullptr),
            "reading a peer's number");
      check(driver().cuCtxSynchronize(), "reading a peer's number");
      if (seen != peer + 1) {
        throw Error(Status::kInternal, "rank " + std::to_string(rank_) + " finds number " + std::to_string(seen - 1) +
                                           " where rank " + std::to_string(peer) + "'s memory should be");
      }
    }
    barrier();
    check(driver().cuMemsetD8Async(own(), 0, sizeof(mine), nullptr), "clearing this rank's number");
    barrier();
  }

  void release_window() {
    if (window_ != nullptr) nccl().deregister_window(communicator_, window_);
    if (own_ != nullptr) nccl().memory_free(own_);
    window_ = nullptr;
    own_ = nullptr;
  }

  // After a failure the other ranks may never come: then nothing waits for them, and a window that is registered is
  // left to the end of the process.
  void release(bool failed) {
    if (!failed || window_ == nullptr) release_window();
    if (owns_communicator_) (failed ? nccl().abort : nccl().destroy)(communicator_);
    if (word_ != 0) driver().cuMemFree(word_);  // waits for the barriers' kernels
  }

  const int exceptions_ = std::uncaught_exceptions();  // that were passing already
  int rank_;
  int ranks_;
  const int device_;
  std::vector<int> own_ranks_;
  int64_t bytes_ = 0;
  Nccl::Communicator communicator_ = nullptr;
  bool owns_communicator_ = false;
  bool abandoned_ = false;
  void* own_ = nullptr;
  Nccl::Window window_ = nullptr;
  CUdeviceptr word_ = 0;
  std::vector<void*> peers_;
};

}  // namespace

NcclBootstrap nccl_bootstrap_from_environment() {
  const std::optional<RankEnvironment> environment = rank_environment();
  if (!environment) {
    throw Error(
        Status::kInvalidArgument,
        "RANK, WORLD_SIZE: not set; a process a rank needs torchrun's environment, a unique id or a communicator");
  }
  setenv("NCCL_COMM_ID", environment->id.c_str(), 1);
  NcclBootstrap bootstrap;
  bootstrap.rank = environment->rank;
  bootstrap.ranks = environment->ranks;
  bootstrap.device = environment->local_rank;
  return bootstrap;
}

std::string make_nccl_unique_id() {
  Nccl::UniqueId id{};
  check_nccl(nccl().get_unique_id(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof(id.bytes));
}

std::unique_ptr<SymmetricMemory> make_nccl_symmetric_memory(const NcclBootstrap& bootstrap, int64_t bytes) {
  if (bytes <= 0 || bootstrap.ranks < 1 || bootstrap.rank < 0 || bootstrap.rank >= bootstrap.ranks) {
    throw Error(Status::kInvalidArgument, "rank " + std::to_string(bootstrap.rank) + " of " +
                                              std::to_string(bootstrap.ranks) + " with " + std::to_string(bytes) +
                                              " bytes is no group");
  }
  return std::make_unique<NcclMemory>(bootstrap, bytes);
}

}  // namespace uniep
