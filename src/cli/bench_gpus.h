#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "uniep/group.h"

namespace uniep::cli {

// The GPUs of a measurement: their memory, and the time that work takes on them. Work is what a function queues on the
// default stream of each GPU, in any order.
class BenchGpus {
 public:
  // Throws Error(kDevice) unless each is a Hopper GPU of this machine. `warm_up_seconds`: how long work runs before it
  // is timed, at the least; a few calls in any case.
  explicit BenchGpus(const std::vector<int>& devices, double warm_up_seconds = 0.0);
  ~BenchGpus();
  // Throws Error(kDevice) unless each is a Hopper GPU of this machine.
  static void require(const std::vector<int>& devices);
  BenchGpus(const BenchGpus&) = delete;
  BenchGpus& operator=(const BenchGpus&) = delete;

  // The work is that of `group`, which outlives this object. Where its ranks are in several processes, all of them make
  // the same calls here, begin those that are to begin together together, and rank 0's gets the slowest one's times
  // (the others their own).
  void measure_group(Group& group) { group_ = &group; }

  // From now on.
  void warm_up_for(double seconds) { warm_up_seconds_ = seconds; }

  std::size_t count() const;
  std::string name() const;  // of the first

  // Device memory of one GPU, until this object ends. Random: normal, times `scale`; never zeros, on which tensor cores
  // run faster.
  void* zeros(std::size_t gpu, int64_t bytes);
  void* random_bfloat16(std::size_t gpu, int64_t values, float scale = 1.0f);
  void* copy_of(std::size_t gpu, const void* host, int64_t bytes);

  // When the GPUs begin: each as soon as its work is queued; all together once everything is (work that does not wait
  // for a GPU); or, if repeated, each when its last call ends, for which some are queued ahead.
  enum class Start { kAtOnce, kTogether, kBackToBack };

  // Milliseconds from the first to the last device work of `work`, on the slowest GPU.
  double time(const std::function<void()>& work, Start start = Start::kAtOnce);
  // The same `repeat` times after the calls that do not count, the L2 caches cold before each.
  std::vector<double> time_cold(const std::function<void()>& work, int repeat, Start start = Start::kAtOnce);
  // Several kinds of work in turn, so that all see the same clocks and temperatures. Of each its times.
  struct Work {
    std::function<void()> run;
    Start start;
  };
  std::vector<std::vector<double>> time_cold_in_turn(const std::vector<Work>& works, int repeat);
  // The same with whatever is in the caches, so that GPUs do nothing else between calls.
  std::vector<std::vector<double>> time_in_turn(const std::vector<Work>& works, int repeat);
  // The same by the host's clock, each from its first call to its return, with whatever is in the caches.
  std::vector<std::vector<double>> time_on_host_in_turn(const std::vector<std::function<void()>>& works, int repeat);
  // Waits until all GPUs are idle.
  void synchronize();

 private:
  struct Gpu;
  class Gate;
  enum class Caches { kCold, kAsTheyAre };
  std::vector<std::vector<double>> time_in_turn(const std::vector<Work>& works, int repeat, Caches caches);
  void flush_caches(int turn);
  // Calls under way are told apart by their slot.
  void queue(const std::function<void()>& work, Start start, std::size_t slot);
  // `turn` as often as it takes, the last time right before this returns; `wait` ends what turns have queued.
  void warm_up(const std::function<void()>& turn, const std::function<void()>& wait);
  void meet();
  std::vector<std::vector<double>> slowest(std::vector<std::vector<double>> own);
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::vector<std::unique_ptr<cuda::DeviceTimer>> timers_;  // of calls under way, by slot
  std::unique_ptr<Gate> gate_;
  double warm_up_seconds_ = 0.0;
  Group* group_ = nullptr;
};

}  // namespace uniep::cli
