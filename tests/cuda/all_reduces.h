#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "tests/cuda/gpu_support.h"
#include "tests/cuda/nccl_communicator.h"

namespace uniep::cuda::test {

// comm.reserve_sms of what runs beside them.
inline constexpr const char* kSmsForAllReduces = "24";

// Before NCCL is used: fewer CTAs than SMs are reserved.
inline void limit_all_reduces() {
  setenv("NCCL_MAX_CTAS", "16", 1);
}

// NCCL's all-reduce of all GPUs, over and over, a thread and a stream for each, while this object lives. It exists once
// the first of them are done: while NCCL sets itself up it may wait for all work of a GPU, and a process in which one
// thread waits for that may not be able to start another GPU's.
class AllReduces {
 public:
  explicit AllReduces(const std::vector<int>& devices) {
    NcclCaller::UniqueId id;
    check_nccl(nccl_caller().get_unique_id(&id), "ncclGetUniqueId");
    for (std::size_t rank = 0; rank < devices.size(); ++rank) {
      threads_.emplace_back([this, id, rank, &devices] { run(id, static_cast<int>(rank), devices); });
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_ > 0; });
  }
  ~AllReduces() { stop(); }
  AllReduces(const AllReduces&) = delete;
  AllReduces& operator=(const AllReduces&) = delete;

  // How many were done by each GPU.
  int64_t stop() {
    stopping_ = true;
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    return done_;
  }

 private:
  static constexpr int64_t kCount = int64_t{8} << 20;
  static constexpr int kRound = 8;

  void run(const NcclCaller::UniqueId& id, int rank, const std::vector<int>& devices) {
    try {
      const ScopedDevice scope(devices[static_cast<std::size_t>(rank)]);
      Nccl::Communicator communicator = nullptr;
      check_nccl(nccl_caller().init_rank(&communicator, static_cast<int>(devices.size()), id, rank),
                 "ncclCommInitRank");
      CUstream stream = nullptr;
      check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      const Buffer values(kCount * static_cast<int64_t>(sizeof(int32_t)));
      values.set_bytes(0);
      check(driver().cuCtxSynchronize(), "clearing");
      // All ranks do the same number of rounds: the first tells in the values when it is the last.
      for (int32_t going_on = 1; going_on != 0;) {
        const int32_t flag = rank == 0 && !stopping_ ? 1 : 0;
        const auto first = reinterpret_cast<CUdeviceptr>(values.as<void>());
        check(driver().cuMemcpyHtoDAsync(first, &flag, sizeof(flag), stream), "writing the flag");
        for (int i = 0; i < kRound; ++i) {
          check_nccl(nccl().all_reduce(values.as<void>(), values.as<void>(), kCount, Nccl::kInt32, Nccl::kSum,
                                       communicator, stream),
                     "ncclAllReduce");
        }
        check(driver().cuMemcpyDtoHAsync(&going_on, first, sizeof(going_on), stream), "reading the flag");
        check(driver().cuStreamSynchronize(stream), "ncclAllReduce");
        if (rank == 0) count_round();
      }
      driver().cuStreamDestroy(stream);
      check_nccl(nccl_caller().destroy(communicator), "ncclCommDestroy");
    } catch (const Error& error) {
      std::printf("FAIL all-reduces of rank %d: %s\n", rank, error.what());
      std::fflush(stdout);
      std::_Exit(1);  // the other ranks would wait for this one for ever
    }
  }

  void count_round() {
    const std::lock_guard lock(mutex_);
    done_ += kRound;
    changed_.notify_all();
  }

  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_ = false;
  std::atomic<int64_t> done_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace uniep::cuda::test
