#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// Ranks as processes of the running program, which starts itself again, and memory that they share.
namespace uniep::cuda::test {

// Of one clock for all processes of a machine.
inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One T of atomics and plain bytes, zero at first. Processes that are started find it by number().
template <typename T>
class SharedObject {
 public:
  SharedObject() : number_(::memfd_create("uniep_test", 0)) {
    if (number_ < 0 || ::ftruncate(number_, sizeof(T)) != 0) throw std::runtime_error("no shared memory");
    map();
  }
  explicit SharedObject(int number) : number_(number) { map(); }
  ~SharedObject() { ::munmap(object_, sizeof(T)); }
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;

  int number() const { return number_; }
  T* operator->() const { return object_; }

 private:
  void map() {
    void* const memory = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, number_, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("can not map shared memory");
    object_ = static_cast<T*>(memory);
  }

  int number_;
  T* object_ = nullptr;
};

// This program in another process, which is killed and waited for when this object goes.
class ChildProcess {
 public:
  ChildProcess() = default;
  explicit ChildProcess(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "/proc/self/exe");
    std::vector<char*> words;
    for (std::string& argument : arguments) words.push_back(argument.data());
    words.push_back(nullptr);
    id_ = ::fork();
    if (id_ < 0) throw std::runtime_error("can not start a process");
    if (id_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::execv(words.front(), words.data());
    ::_exit(127);
  }
  ~ChildProcess() { kill(); }
  ChildProcess(ChildProcess&& other) noexcept : id_(std::exchange(other.id_, -1)), status_(other.status_) {}
  ChildProcess& operator=(ChildProcess&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(status_, other.status_);
    return *this;
  }

  bool started() const { return id_ > 0; }
  void signal(int number) const {
    if (id_ > 0) ::kill(id_, number);
  }
  void kill() {
    if (id_ <= 0) return;
    ::kill(id_, SIGKILL);
    while (::waitpid(id_, &status_, 0) < 0 && errno == EINTR) continue;
    id_ = -1;
  }
  // Does not wait.
  bool has_ended() {
    if (id_ > 0 && ::waitpid(id_, &status_, WNOHANG) == id_) id_ = -1;
    return id_ <= 0;
  }
  // Of one that has ended; -1: by a signal.
  int exit_status() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : -1; }

 private:
  pid_t id_ = -1;
  int status_ = 0;
};

// Whether it holds before the time is over.
inline bool await(double seconds, const std::function<bool()>& holds) {
  constexpr std::chrono::microseconds kPause{20};
  const double end = seconds_now() + seconds;
  while (!holds()) {
    if (seconds_now() > end) return holds();
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

}  // namespace uniep::cuda::test
