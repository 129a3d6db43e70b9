#include "reference/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace uniep::reference {

void parallel_for(int64_t count, double flops, const std::function<void(int64_t)>& task) {
  constexpr double kFlopsWorthAThread = 4e6;  // about a millisecond: far above what starting a thread costs
  const double worth = std::min(flops / kFlopsWorthAThread, 1e6);
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const int64_t threads = std::min({cores, count, 1 + static_cast<int64_t>(worth)});

  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (int64_t i = next++; i < count; i = next++) task(i);
    } catch (...) {
      next = count;
      const std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    others.reserve(static_cast<size_t>(std::max<int64_t>(0, threads - 1)));
    try {
      for (int64_t i = 1; i < threads; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {  // those that there are do all of it
    }
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace uniep::reference
