#include "cli/bench_gpus.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <utility>

#include "cli/gathered.h"
#include "engine/cuda/runtime/driver.h"
#include "model/elementwise.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

using namespace cuda;

constexpr int64_t kFlushBytes = 256 << 20;  // several times the L2 cache
constexpr int kWarmUpCalls = 3;
constexpr std::size_t kCallsUnderWay = 8;
constexpr std::size_t kRandomPiece = 4 << 20;

const std::vector<BFloat16>& random_piece() {
  static const std::vector<BFloat16> values = [] {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<BFloat16> piece(kRandomPiece);
    for (BFloat16& value : piece) value = to_bfloat16(normal(generator));
    return piece;
  }();
  return values;
}

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

// One line that says which GPU is missing: no Hopper GPU is a failure of the machine, not of the command line.
void require_gpu(int device) {
  try {
    require_hopper(device);
  } catch (const Error& error) {
    throw Error(Status::kDevice, "GPU " + std::to_string(device) + ": " + error.what());
  }
}

}  // namespace

struct BenchGpus::Gpu {
  explicit Gpu(int index) : device(index) {
    const ScopedDevice scope(device);
    flush = allocate(kFlushBytes);
  }
  ~Gpu() {
    const ScopedDevice scope(device);
    for (const CUdeviceptr address : allocations) driver().cuMemFree(address);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  CUdeviceptr allocate(int64_t bytes) {
    CUdeviceptr address = 0;
    check(driver().cuMemAlloc(&address, static_cast<size_t>(std::max<int64_t>(bytes, 16))), "cuMemAlloc");
    allocations.push_back(address);
    return address;
  }

  int device;
  CUdeviceptr flush = 0;
  std::vector<CUdeviceptr> allocations;
};

// Holds back the streams of all GPUs until it is opened. It opens by itself after a while, so that work that waits for
// a GPU after all is measured wrongly but ends.
class BenchGpus::Gate {
 public:
  explicit Gate(int device) {
    const ScopedDevice scope(device);
    void* memory = nullptr;
    check(driver().cuMemHostAlloc(&memory, sizeof(uint32_t), CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
    word_ = new (memory) std::atomic<uint32_t>(0);
    watchdog_ = std::thread([this] { watch(); });
  }
  ~Gate() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    watchdog_.join();
    driver().cuMemFreeHost(word_);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++turn_;
    }
    changed_.notify_all();
  }
  void hold_back(CUstream stream) {
    check(driver().cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(word_), turn_, CU_STREAM_WAIT_VALUE_GEQ),
          "cuStreamWaitValue32");
  }
  void open() { word_->store(turn_, std::memory_order_release); }

 private:
  void watch() {
    constexpr std::chrono::seconds kLongest{2};
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ended_) {
      const uint32_t watched = turn_;
      const bool changed = changed_.wait_for(lock, kLongest, [&] { return ended_ || turn_ != watched; });
      if (!changed) word_->store(watched, std::memory_order_release);
    }
  }

  std::atomic<uint32_t>* word_ = nullptr;  // in memory that the GPUs read
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t turn_ = 0;
  bool ended_ = false;
  std::thread watchdog_;
};

BenchGpus::BenchGpus(const std::vector<int>& devices, double warm_up_seconds) : warm_up_seconds_(warm_up_seconds) {
  for (const int device : devices) {
    require_gpu(device);
    gpus_.push_back(std::make_unique<Gpu>(device));
  }
  for (std::size_t i = 0; i < kCallsUnderWay; ++i) timers_.push_back(std::make_unique<DeviceTimer>(devices));
  gate_ = std::make_unique<Gate>(devices.front());
}

BenchGpus::~BenchGpus() = default;

void BenchGpus::require(const std::vector<int>& devices) {
  for (const int device : devices) require_gpu(device);
}

std::size_t BenchGpus::count() const {
  return gpus_.size();
}

std::string BenchGpus::name() const {
  return device_name(gpus_.front()->device);
}

void* BenchGpus::zeros(std::size_t gpu, int64_t bytes) {
  const ScopedDevice scope(gpus_[gpu]->device);
  const CUdeviceptr address = gpus_[gpu]->allocate(bytes);
  check(driver().cuMemsetD8Async(address, 0, static_cast<size_t>(bytes), nullptr), "cuMemsetD8Async");
  return pointer(address);
}

void* BenchGpus::copy_of(std::size_t gpu, const void* host, int64_t bytes) {
  const ScopedDevice scope(gpus_[gpu]->device);
  const CUdeviceptr address = gpus_[gpu]->allocate(bytes);
  check(driver().cuMemcpyHtoDAsync(address, host, static_cast<size_t>(bytes), nullptr), "cuMemcpyHtoD");
  check(driver().cuCtxSynchronize(), "copying to the GPU");
  return pointer(address);
}

// One random piece, over and over: what is there is copied behind itself.
void* BenchGpus::random_bfloat16(std::size_t gpu, int64_t values, float scale) {
  std::vector<BFloat16> piece = random_piece();
  for (BFloat16& value : piece) value = to_bfloat16(scale * to_float(value));
  const ScopedDevice scope(gpus_[gpu]->device);
  const CUdeviceptr address = gpus_[gpu]->allocate(values * 2);
  const auto bytes = static_cast<size_t>(values) * 2;
  size_t filled = std::min(bytes, piece.size() * 2);
  check(driver().cuMemcpyHtoDAsync(address, piece.data(), filled, nullptr), "cuMemcpyHtoD");
  while (filled < bytes) {
    const size_t part = std::min(filled, bytes - filled);
    check(driver().cuMemcpyDtoDAsync(address + filled, address, part, nullptr), "cuMemcpyDtoD");
    filled += part;
  }
  check(driver().cuCtxSynchronize(), "filling with random values");
  return pointer(address);
}

void BenchGpus::synchronize() {
  for (const auto& gpu : gpus_) {
    const ScopedDevice scope(gpu->device);
    check(driver().cuCtxSynchronize(), "waiting for a GPU");
  }
}

void BenchGpus::flush_caches(int turn) {
  for (const auto& gpu : gpus_) {
    const ScopedDevice scope(gpu->device);
    check(driver().cuMemsetD8Async(gpu->flush, static_cast<unsigned char>(turn), kFlushBytes, nullptr), "flushing L2");
  }
}

double BenchGpus::time(const std::function<void()>& work, Start start) {
  queue(work, start, 0);
  return timers_.front()->milliseconds();
}

void BenchGpus::queue(const std::function<void()>& work, Start start, std::size_t slot) {
  if (start == Start::kTogether) {
    gate_->close();
    for (const auto& gpu : gpus_) {
      const ScopedDevice scope(gpu->device);
      gate_->hold_back(nullptr);
    }
  }
  timers_[slot]->start();
  work();
  timers_[slot]->stop();
  if (start == Start::kTogether) gate_->open();
}

std::vector<double> BenchGpus::time_cold(const std::function<void()>& work, int repeat, Start start) {
  return time_cold_in_turn({{work, start}}, repeat).front();
}

void BenchGpus::meet() {
  if (group_ != nullptr) group_->implementation().meet();
}

// How often is for rank 0 to say: all processes have to make the same calls, whatever their clocks say.
void BenchGpus::warm_up(const std::function<void()>& turn, const std::function<void()>& wait) {
  if (warm_up_seconds_ <= 0.0) return;
  wait();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t done = 0;;) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    const double left = warm_up_seconds_ - elapsed.count();
    int64_t more = done == 0 ? 1 : 0;
    if (done > 0 && left > 0.0) {
      more = static_cast<int64_t>(std::ceil(left / elapsed.count() * static_cast<double>(done)));
    }
    if (group_ != nullptr) more = group_->implementation().all_gather(more).front();
    if (more == 0) break;
    for (int64_t i = 0; i < more; ++i) turn();
    wait();
    done += more;
  }
  turn();  // the pause in which they agreed is over
}

std::vector<std::vector<double>> BenchGpus::slowest(std::vector<std::vector<double>> own) {
  if (group_ == nullptr) return own;
  std::vector<double> flat;
  for (const std::vector<double>& times : own) flat.insert(flat.end(), times.begin(), times.end());
  flat = slowest_times(*group_, std::move(flat));
  auto next = flat.begin();
  for (std::vector<double>& times : own) {
    for (double& time : times) time = *next++;
  }
  return own;
}

std::vector<std::vector<double>> BenchGpus::time_cold_in_turn(const std::vector<Work>& works, int repeat) {
  return time_in_turn(works, repeat, Caches::kCold);
}

std::vector<std::vector<double>> BenchGpus::time_in_turn(const std::vector<Work>& works, int repeat) {
  return time_in_turn(works, repeat, Caches::kAsTheyAre);
}

std::vector<std::vector<double>> BenchGpus::time_in_turn(const std::vector<Work>& works, int repeat, Caches caches) {
  std::vector<std::vector<double>> times(works.size());
  struct QueuedCall {
    std::size_t work;
    bool counts;
  };
  std::array<QueuedCall, kCallsUnderWay> calls;
  std::size_t queued = 0;
  std::size_t ended = 0;
  const auto end_calls = [&](std::size_t left) {
    for (; queued - ended > left; ++ended) {
      const QueuedCall& call = calls[ended % kCallsUnderWay];
      const double taken = timers_[ended % kCallsUnderWay]->milliseconds();
      if (call.counts) times[call.work].push_back(taken);
    }
  };
  int turns = 0;
  const auto run_turn = [&](bool counts) {
    for (std::size_t i = 0; i < works.size(); ++i) {
      // The first calls compile kernels and take memory, for which they may wait for GPUs.
      const Start start = turns == 0 ? Start::kAtOnce : works[i].start;
      end_calls(start == Start::kBackToBack ? kCallsUnderWay - 1 : 0);
      if (caches == Caches::kCold) flush_caches(turns);
      if (start != Start::kBackToBack) meet();
      calls[queued % kCallsUnderWay] = {i, counts};
      queue(works[i].run, start, queued % kCallsUnderWay);
      ++queued;
    }
    ++turns;
  };
  for (int call = 0; call < kWarmUpCalls; ++call) run_turn(false);
  warm_up([&] { run_turn(false); }, [&] { end_calls(0); });
  for (int call = 0; call < repeat; ++call) run_turn(true);
  end_calls(0);
  return slowest(std::move(times));
}

std::vector<std::vector<double>> BenchGpus::time_on_host_in_turn(const std::vector<std::function<void()>>& works,
                                                                 int repeat) {
  std::vector<std::vector<double>> times(works.size());
  const auto run_turn = [&](bool counts) {
    for (std::size_t i = 0; i < works.size(); ++i) {
      meet();
      const auto begin = std::chrono::steady_clock::now();
      works[i]();
      const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - begin;
      if (counts) times[i].push_back(taken.count());
    }
  };
  run_turn(false);
  warm_up([&] { run_turn(false); }, [] {});
  for (int call = 0; call < repeat; ++call) run_turn(true);
  return slowest(std::move(times));
}

}  // namespace uniep::cli
