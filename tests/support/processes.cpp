#include "support/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>

#include "comm/deadline.h"
#include "uniep/error.h"

namespace uniep::test {

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Reporter::line(const std::string& text) const {
  ::dprintf(descriptor_, "%s\n", text.c_str());
}

std::string Reporter::error_of(const std::function<void()>& action) const {
  try {
    action();
    return "none";
  } catch (const Error& error) {
    return std::string(status_name(error.status())) + ": " + error.what();
  }
}

Process::Process(const std::function<void(const Reporter&)>& body) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  lines_ = Descriptor(ends[0]);
  const Descriptor writer(ends[1]);
  id_ = ::fork();
  if (id_ != 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const Reporter reporter(writer.number());
  try {
    body(reporter);
  } catch (const std::exception& error) {
    reporter.line(std::string("exception: ") + error.what());
    ::_exit(1);
  }
  ::_exit(0);
}

Process::~Process() {
  end();
}

Process::Process(Process&& other) noexcept
    : id_(std::exchange(other.id_, -1)), lines_(std::move(other.lines_)), read_(std::move(other.read_)) {}

Process& Process::operator=(Process&& other) noexcept {
  std::swap(id_, other.id_);
  std::swap(lines_, other.lines_);
  std::swap(read_, other.read_);
  return *this;
}

void Process::signal(int number) const {
  ::kill(id_, number);
}

void Process::end() {
  if (id_ <= 0) return;
  ::kill(id_, SIGKILL);
  while (::waitpid(id_, nullptr, 0) < 0 && errno == EINTR) continue;
  id_ = -1;
}

std::string Process::line(double seconds) {
  const Deadline deadline(seconds);
  for (;;) {
    const std::size_t end = read_.find('\n');
    if (end != std::string::npos) {
      std::string text = read_.substr(0, end);
      read_.erase(0, end + 1);
      return text;
    }
    pollfd open{lines_.number(), POLLIN, 0};
    if (::poll(&open, 1, deadline.milliseconds()) == 0 && deadline.passed()) return "(silent)";
    std::array<char, 4096> bytes{};
    const ssize_t size = open.revents == 0 ? -1 : ::read(lines_.number(), bytes.data(), bytes.size());
    if (size == 0) return "";
    if (size > 0) read_.append(bytes.data(), static_cast<std::size_t>(size));
  }
}

}  // namespace uniep::test
