#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

#include "io/descriptor.h"

namespace uniep::test {

// Bounds of a test's waits hold on a machine that has other work, and under sanitizers.
#ifdef UNIEP_SANITIZED
constexpr double kSlackSeconds = 4;
#else
constexpr double kSlackSeconds = 1;
#endif

double monotonic_seconds();

// How a process tells the test what happened, a line each.
class Reporter {
 public:
  explicit Reporter(int descriptor) : descriptor_(descriptor) {}
  void line(const std::string& text) const;
  // "none", or the status name and the text of the Error that `action` throws.
  std::string error_of(const std::function<void()>& action) const;

 private:
  int descriptor_;
};

// A child that runs `body` and ends without the test program's own end. It is killed and waited for when this goes.
class Process {
 public:
  explicit Process(const std::function<void(const Reporter&)>& body);
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;

  pid_t id() const { return id_; }
  void signal(int number) const;
  void end();  // SIGKILL, and waits

  // Its next line; "" when it ended, "(silent)" when none came in time.
  std::string line(double seconds = 20);

 private:
  pid_t id_ = -1;
  Descriptor lines_;
  std::string read_;
};

}  // namespace uniep::test
