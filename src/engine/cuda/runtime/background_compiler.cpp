#include "engine/cuda/runtime/background_compiler.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <vector>

namespace uniep::cuda {
namespace {

constexpr int kLowest = 19;  // of a thread's priorities

// gettid() is younger than the C libraries that the wheel is for.
pid_t thread_id() {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

// Runs before what was given to atexit() does: the compiler's library gives it what takes the library down, also while
// it compiles for the first time, and a thread that compiles then would end the process.
class AtMainThreadsEnd {
 public:
  explicit AtMainThreadsEnd(void (*run)()) : run_(run) {}
  ~AtMainThreadsEnd() {
    if (thread_id() == ::getpid()) run_();
  }
  void use() const {}

 private:
  void (*run_)();
};

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

BackgroundCompiler& BackgroundCompiler::of_process() {
  static auto* const compiler = new BackgroundCompiler;
  return *compiler;
}

Preparation BackgroundCompiler::prepare(std::span<const KernelRequest> requests, const Asker& asker) {
  const KernelCache cache;
  std::vector<KernelRequest> unknown;
  {
    const std::lock_guard lock(mutex_);
    for (const KernelRequest& request : distinct_modules(requests)) {
      if (!kernels_.contains(request.description())) unknown.push_back(request);
    }
  }
  // Files are read outside of the lock.
  std::vector<KernelRequest> missing;
  for (const KernelRequest& request : unknown) {
    std::string stored;
    if (!cache.load(cache_key(request), stored)) missing.push_back(request);
  }
  if (!missing.empty()) {
    std::rotate(missing.begin(), missing.begin() + asker.first % static_cast<int>(missing.size()), missing.end());
  }
  Preparation preparation;
  const std::lock_guard lock(mutex_);
  for (KernelRequest& request : missing) {
    const std::string name = request.description();
    if (kernels_.try_emplace(name, Kernel{std::move(request), cache}).second) queue_.push_back(name);
  }
  for (const KernelRequest& request : distinct_modules(requests)) {
    const auto found = kernels_.find(request.description());
    if (found != kernels_.end()) found->second.owners.insert(asker.owner);
  }
  start_threads(asker.threads);
  for (const KernelRequest& request : distinct_modules(requests)) {
    const auto found = kernels_.find(request.description());
    if (found == kernels_.end()) continue;
    const Kernel& kernel = found->second;
    preparation.compiling += kernel.state == State::kQueued || kernel.state == State::kRunning;
    if (preparation.failed.empty()) preparation.failed = kernel.failed;
  }
  return preparation;
}

// With the lock.
void BackgroundCompiler::start_threads(int limit) {
  for (std::thread& thread : ended_) thread.join();
  ended_.clear();
  process_ = ::getpid();
  if (this == &of_process()) {
    thread_local const AtMainThreadsEnd stop_first([] { of_process().stop(); });
    stop_first.use();
  }
  try {
    const auto wanted = std::min<std::size_t>(static_cast<std::size_t>(std::max(limit, 1)), queue_.size());
    while (!stopping_ && threads_.size() < wanted) {
      const auto self = threads_.emplace(threads_.end());
      try {
        *self = std::thread([this, self] { work(self); });
      } catch (...) {
        threads_.erase(self);
        throw;
      }
    }
  } catch (const std::system_error&) {
    if (!threads_.empty()) return;
    for (const std::string& name : queue_) kernels_.erase(name);
    queue_.clear();
  }
}

void BackgroundCompiler::work(std::list<std::thread>::iterator self) {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(thread_id()), kLowest);
  std::unique_lock lock(mutex_);
  while (!stopping_ && !queue_.empty()) {
    const std::string name = queue_.front();
    queue_.pop_front();
    compile(lock, name);
  }
  ended_.splice(ended_.end(), threads_, self);
  ended_one_.notify_all();
}

// Nobody takes a kernel that is being compiled away.
void BackgroundCompiler::compile(std::unique_lock<std::mutex>& lock, const std::string& name) {
  Kernel& kernel = kernels_.at(name);
  kernel.state = State::kRunning;
  lock.unlock();
  std::string cubin, failed, stored;
  try {
    const std::string key = cache_key(kernel.request);
    // Another process may have made it meanwhile.
    if (!kernel.cache.load(key, stored)) {
      cubin = compile_(kernel.request).cubin;
      kernel.cache.store(key, cubin);
      if (kernel.cache.load(key, stored)) cubin.clear();
    }
  } catch (const std::exception& error) {
    failed = first_line(error.what());
  } catch (...) {
    failed = "an exception of an unknown type";
  }
  if (this == &of_process()) {
    // For threads that have no AtMainThreadsEnd: by now the library has given atexit() most of its own.
    [[maybe_unused]] static const int registered = std::atexit([] { of_process().stop(); });
  }
  lock.lock();
  kernel.state = failed.empty() ? State::kCompiled : State::kFailed;
  kernel.cubin = std::move(cubin);
  kernel.failed = std::move(failed);
}

void BackgroundCompiler::drop(const void* owner) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& [name, kernel] : kernels_) kernel.owners.erase(owner);
  std::erase_if(queue_, [&](const std::string& name) {
    const bool unwanted = kernels_.at(name).owners.empty();
    if (unwanted) kernels_.erase(name);
    return unwanted;
  });
}

bool BackgroundCompiler::find(const KernelRequest& request, std::string& cubin) const {
  const std::lock_guard lock(mutex_);
  const auto found = kernels_.find(request.description());
  if (found == kernels_.end() || found->second.cubin.empty()) return false;
  cubin = found->second.cubin;
  return true;
}

int BackgroundCompiler::threads() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(threads_.size());
}

void BackgroundCompiler::stop() noexcept {
  if (process_ != ::getpid()) return;  // a fork has none of the threads
  std::unique_lock lock(mutex_);
  stopping_ = true;
  ended_one_.wait(lock, [&] { return threads_.empty(); });
  std::list<std::thread> ended;
  ended.swap(ended_);
  lock.unlock();
  for (std::thread& thread : ended) thread.join();
}

}  // namespace uniep::cuda
