#pragma once

namespace uniep::cuda {

// Host time under a name, in NVTX's domain "uniep": what a profiler shows of a call. Costs a test where no profiler
// runs; nothing where the library was built without NVTX's headers. One thread; ranges nest.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace uniep::cuda
