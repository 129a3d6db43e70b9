#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>

#include "engine/cuda/runtime/kernel_cache.h"
#include "engine/cuda/runtime/run_time_compiler.h"
#include "uniep/preparation.h"

namespace uniep::cuda {

// Compiles kernels beside calls, in threads of low priority that end when nothing is left to do. It loads nothing, and
// holds no lock of a call's while it compiles. What it has compiled lies in the kernel cache; here, where that keeps
// nothing.
class BackgroundCompiler {
 public:
  using Compile = std::function<CompiledKernel(const KernelRequest&)>;

  // The one that all groups of this process share. exit() waits for compilations that run, where the main thread has
  // asked for one, or one has ended.
  static BackgroundCompiler& of_process();

  explicit BackgroundCompiler(Compile compile = compile_kernel) : compile_(std::move(compile)) {}
  ~BackgroundCompiler() { stop(); }
  BackgroundCompiler(const BackgroundCompiler&) = delete;
  BackgroundCompiler& operator=(const BackgroundCompiler&) = delete;

  struct Asker {
    const void* owner = nullptr;  // for drop()
    int threads = 1;              // at most
    int first = 0;                // processes that share a cache begin with different kernels
  };
  // Begins what is not compiled and not begun, and waits for none. Where the system makes no thread nothing is begun,
  // and nothing counts as being compiled: a call will compile it. Throws what the cache and its key throw.
  Preparation prepare(std::span<const KernelRequest> requests, const Asker& asker);

  // What this one alone has asked for, and what is not begun, is not compiled.
  void drop(const void* owner) noexcept;

  // A compiled kernel that the cache has not kept.
  bool find(const KernelRequest& request, std::string& cubin) const;

  int threads() const;

 private:
  enum class State { kQueued, kRunning, kCompiled, kFailed };
  struct Kernel {
    KernelRequest request;
    KernelCache cache;
    State state = State::kQueued;
    std::set<const void*> owners = {};
    std::string cubin = {};
    std::string failed = {};
  };

  void start_threads(int limit);
  void work(std::list<std::thread>::iterator self);
  void compile(std::unique_lock<std::mutex>& lock, const std::string& name);
  void stop() noexcept;

  const Compile compile_;
  mutable std::mutex mutex_;
  std::condition_variable ended_one_;
  std::map<std::string, Kernel> kernels_;  // by description
  std::deque<std::string> queue_;
  std::list<std::thread> threads_, ended_;
  bool stopping_ = false;
  pid_t process_ = 0;  // that the threads are in
};

}  // namespace uniep::cuda
