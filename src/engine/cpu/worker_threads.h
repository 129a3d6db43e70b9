#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace uniep::cpu {

// Threads that live as long as the group and sleep between calls.
class WorkerThreads {
 public:
  // Throws Error(kOutOfMemory) where the system makes no more threads; none is left running then.
  explicit WorkerThreads(int count);
  // Waits for them, but in a forked child, which has none of them.
  ~WorkerThreads();
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  int count() const { return static_cast<int>(threads_.size()); }
  // Throws Error(kInvalidArgument) in a forked child.
  void require_own_process() const;
  // Runs job(thread) on every thread and returns when all have returned. The job must not throw. Throws as
  // require_own_process() does.
  void run(const std::function<void(int)>& job);

 private:
  void loop(int thread);
  void stop();

  const pid_t process_;  // that the threads are in
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(int)>* job_ = nullptr;
  uint64_t round_ = 0;
  int running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace uniep::cpu
