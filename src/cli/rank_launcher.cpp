#include "cli/rank_launcher.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string_view>
#include <utility>

#include "cli/command_line.h"
#include "io/descriptor.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

constexpr int kNotStarted = 127;
constexpr int kMaxReads = 1000;  // of what a process has left in its pipe, which others may fill for ever

[[noreturn]] void fail(const char* action, int error_number) {
  throw Error(Status::kDevice, fmt::format("--launch: processes: {}: {}", action, std::strerror(error_number)));
}

bool is_free(uint16_t port) {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return ::bind(listener.number(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

// A MASTER_PORT that nobody uses, for what else runs in the ranks; below those that the system deals out, so that no
// connection of theirs gets it first.
int meeting_port() {
  constexpr int kFirst = 16384, kCount = 16000;
  for (int i = 0; i < kCount; ++i) {
    const int port = kFirst + (static_cast<int>(::getpid()) * 31 + i) % kCount;
    if (is_free(static_cast<uint16_t>(port))) return port;
  }
  fail("finding a port for the ranks to meet", EADDRINUSE);
}

// Keeps apart those that run side by side, also in containers that share their network and have equal process ids.
std::string job_name() {
  std::array<uint64_t, 2> number{};
  if (::getrandom(number.data(), sizeof(number), 0) != sizeof(number)) fail("naming the job", errno);
  return fmt::format("uniep {:016x}{:016x}", number[0], number[1]);
}

// This process's environment with a rank's variables.
std::vector<std::string> environment_of(int rank, int ranks, int port, const std::string& job) {
  const std::array<std::pair<std::string, std::string>, 7> own = {{{"RANK", std::to_string(rank)},
                                                                   {"WORLD_SIZE", std::to_string(ranks)},
                                                                   {"LOCAL_RANK", std::to_string(rank)},
                                                                   {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
                                                                   {"TORCHELASTIC_RUN_ID", job},
                                                                   {"MASTER_ADDR", "127.0.0.1"},
                                                                   {"MASTER_PORT", std::to_string(port)}}};
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const std::string_view name = text.substr(0, text.find('='));
    const bool replaced = std::any_of(own.begin(), own.end(), [&](const auto& of) { return of.first == name; });
    if (!replaced) variables.emplace_back(text);
  }
  for (const auto& [name, value] : own) variables.push_back(fmt::format("{}={}", name, value));
  return variables;
}

std::vector<char*> addresses_of(std::vector<std::string>& texts) {
  std::vector<char*> addresses;
  for (std::string& text : texts) addresses.push_back(text.data());
  addresses.push_back(nullptr);
  return addresses;
}

// SIGHUP, SIGINT and SIGTERM, as far as they are not ignored, come to poll() while this lives, and to nothing else.
class HeldSignals {
 public:
  HeldSignals() {
    ::sigemptyset(&held_);
    for (const int signal : {SIGHUP, SIGINT, SIGTERM}) {
      struct sigaction now {};
      if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&held_, signal);
    }
    came_ = Descriptor(::signalfd(-1, &held_, SFD_CLOEXEC | SFD_NONBLOCK));
    if (came_.number() < 0) fail("watching for signals", errno);
    ::pthread_sigmask(SIG_BLOCK, &held_, &before_);
  }
  ~HeldSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  int came() const { return came_.number(); }
  const sigset_t& before() const { return before_; }
  // 0: none.
  int take() {
    signalfd_siginfo signal{};
    return ::read(came_.number(), &signal, sizeof(signal)) == sizeof(signal) ? static_cast<int>(signal.ssi_signo) : 0;
  }

 private:
  sigset_t held_{}, before_{};
  Descriptor came_;
};

// A process that is ended and waited for when this object goes.
class RankProcess {
 public:
  RankProcess(const Command& command, std::vector<std::string> environment, const sigset_t& signals) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("making a pipe", errno);
    messages_ = Descriptor(ends[0]);
    const Descriptor writer(ends[1]);
    std::vector<std::string> words = {command.program};
    words.insert(words.end(), command.arguments.begin(), command.arguments.end());
    const std::vector<char*> values = addresses_of(words), variables = addresses_of(environment);
    const pid_t parent = ::getpid();
    id_ = ::fork();
    if (id_ < 0) fail("starting a process", errno);
    if (id_ > 0) {
      watch();
      return;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives the one that started it
    ::pthread_sigmask(SIG_SETMASK, &signals, nullptr);
    if (::getppid() != parent || ::dup2(writer.number(), STDERR_FILENO) < 0) ::_exit(kNotStarted);
    ::execve(command.program.c_str(), values.data(), variables.data());
    ::dprintf(STDERR_FILENO, "can not start: %s\n", std::strerror(errno));
    ::_exit(kNotStarted);
  }
  ~RankProcess() {
    if (id_ <= 0) return;
    ::kill(id_, SIGKILL);
    while (::waitpid(id_, nullptr, 0) < 0 && errno == EINTR) continue;
  }
  RankProcess(RankProcess&& other) noexcept
      : id_(std::exchange(other.id_, -1)),
        messages_(std::move(other.messages_)),
        end_(std::move(other.end_)),
        text_(std::move(other.text_)) {}
  RankProcess& operator=(RankProcess&&) = delete;

  void ask_to_end() const {
    if (id_ > 0) ::kill(id_, SIGTERM);
  }

  int messages() const { return messages_.number(); }
  // Readable when the process itself has ended.
  int end() const { return end_.number(); }
  const std::string& text() const { return text_; }

  // Takes what it has written to standard error. False when there will be no more, or now is none.
  bool read_messages() {
    std::array<char, 4096> bytes{};
    const ssize_t count = ::read(messages_.number(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) return true;
    if (count > 0) text_.append(bytes.data(), static_cast<std::size_t>(count));
    return count > 0;
  }

  // All lines but the last, which may be why the process fails.
  void print_lines() {
    const std::size_t before = text_.size() < 2 ? std::string::npos : text_.rfind('\n', text_.size() - 2);
    if (before == std::string::npos) return;
    std::cerr << std::string_view(text_).substr(0, before + 1) << std::flush;
    text_.erase(0, before + 1);
  }

  // As waitpid() gives it.
  int wait() {
    int status = 0;
    while (::waitpid(id_, &status, 0) < 0) {
      if (errno != EINTR) fail("waiting for a process", errno);
    }
    id_ = -1;
    return status;
  }

 private:
  void watch() {
    ::fcntl(messages_.number(), F_SETFL, O_NONBLOCK);  // the writing end keeps its own mode
    end_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, id_, 0)));
    if (end_.number() < 0) fail("watching a process", errno);
  }

  pid_t id_ = -1;
  Descriptor messages_, end_;
  std::string text_;
};

std::string last_line(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  const std::size_t before = text.rfind('\n');
  return std::string(before == std::string_view::npos ? text : text.substr(before + 1));
}

[[noreturn]] void report(int rank, int status, const std::string& text, const std::string& name) {
  std::string message = last_line(text);
  if (message.starts_with(name + ": ")) message.erase(0, name.size() + 2);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kBadUsage && !message.empty()) {
    throw Error(Status::kInvalidArgument, message);  // every rank's
  }
  if (WIFSIGNALED(status)) {
    message = fmt::format("ended by signal {} ({}){}{}", WTERMSIG(status), ::strsignal(WTERMSIG(status)),
                          message.empty() ? "" : "; its last words: ", message);
  } else if (message.empty()) {
    message = fmt::format("ended with exit status {} and without a message", WEXITSTATUS(status));
  }
  throw Error(Status::kDevice, fmt::format("rank {}: {}", rank, message));
}

// Somebody ends this program: the ranks are asked to end, too, which leaves nothing half done (tune/trial_mark.h), and
// killed where they do not.
void end_ranks(const std::vector<RankProcess>& processes) {
  constexpr std::chrono::seconds kPatience{2};
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (const RankProcess& process : processes) process.ask_to_end();
  for (const RankProcess& process : processes) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd end = {process.end(), POLLIN, 0};
    ::poll(&end, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
  }
}

// Until all have ended, or a signal has come, which is given back.
int wait_for(std::vector<RankProcess>& processes, HeldSignals& signals, const std::string& name) {
  std::vector<pollfd> open;  // two a rank: its messages and its end, which a process of its own may outlive
  for (const RankProcess& process : processes) {
    open.push_back({process.messages(), POLLIN, 0});
    open.push_back({process.end(), POLLIN, 0});
  }
  open.push_back({signals.came(), POLLIN, 0});
  for (std::size_t running = processes.size(); running > 0;) {
    if (::poll(open.data(), open.size(), -1) < 0) {
      if (errno == EINTR) continue;
      fail("waiting for the ranks", errno);
    }
    if (const int signal = signals.take(); signal != 0) return signal;
    for (std::size_t rank = 0; rank < processes.size(); ++rank) {
      RankProcess& process = processes[rank];
      pollfd& messages = open[2 * rank];
      pollfd& end = open[2 * rank + 1];
      const bool ended = end.fd >= 0 && end.revents != 0;
      if (messages.fd >= 0 && messages.revents != 0 && !process.read_messages()) messages.fd = -1;
      process.print_lines();
      if (!ended) continue;
      for (int more = kMaxReads; more > 0 && messages.fd >= 0 && process.read_messages();) --more;
      process.print_lines();
      messages.fd = end.fd = -1;
      --running;
      const int status = process.wait();
      if (status == 0) continue;
      // Of a whole process group's signal it has ended; it has not failed.
      if (const int signal = signals.take(); signal != 0) return signal;
      report(static_cast<int>(rank), status, process.text(), name);
    }
  }
  return 0;
}

}  // namespace

void launch_ranks(const Command& command, const std::string& name, int ranks) {
  int signal = 0;
  {
    HeldSignals signals;
    const int port = meeting_port();
    const std::string job = job_name();
    std::vector<RankProcess> processes;
    for (int rank = 0; rank < ranks; ++rank) {
      processes.emplace_back(command, environment_of(rank, ranks, port, job), signals.before());
    }
    signal = wait_for(processes, signals, name);
    if (signal != 0) end_ranks(processes);
    for (const RankProcess& process : processes) std::cerr << process.text();
  }
  if (signal == 0) return;
  ::raise(signal);
  std::_Exit(128 + signal);  // the first process of a container is not ended by a signal of its own
}

}  // namespace uniep::cli
