#include "engine/cpu/worker_threads.h"

#include <fmt/format.h>
#include <unistd.h>

#include <memory>
#include <system_error>

#include "engine/cpu/kernels.h"
#include "uniep/error.h"

namespace uniep::cpu {

WorkerThreads::WorkerThreads(int count) : process_(::getpid()) {
  threads_.reserve(static_cast<std::size_t>(count));
  try {
    for (int thread = 0; thread < count; ++thread) threads_.emplace_back([this, thread] { loop(thread); });
  } catch (const std::system_error& error) {
    stop();
    throw Error(Status::kOutOfMemory,
                fmt::format("workers: the system made {} of {} threads: {}", this->count(), count, error.what()));
  } catch (...) {
    stop();
    throw;
  }
}

// In a child the ends of both would wait for threads of the parent, so new ones take their places, which have none.
WorkerThreads::~WorkerThreads() {
  if (::getpid() == process_) {
    stop();
    return;
  }
  for (std::thread& thread : threads_) std::construct_at(&thread);
  std::construct_at(&changed_);
}

void WorkerThreads::require_own_process() const {
  if (::getpid() == process_) return;
  throw Error(
      Status::kInvalidArgument,
      fmt::format("group: of process {}, and used in its forked child {}; make a Group there", process_, ::getpid()));
}

void WorkerThreads::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerThreads::run(const std::function<void(int)>& job) {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  job_ = &job;
  running_ = count();
  ++round_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return running_ == 0; });
}

void WorkerThreads::loop(int thread) {
  set_exact_arithmetic();
  uint64_t round = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || round_ != round; });
    if (stopping_) return;
    round = round_;
    const std::function<void(int)>& job = *job_;
    lock.unlock();
    job(thread);
    lock.lock();
    if (--running_ == 0) changed_.notify_all();
  }
}

}  // namespace uniep::cpu
