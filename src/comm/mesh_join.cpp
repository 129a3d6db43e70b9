#include "comm/mesh_join.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "comm/name_hash.h"
#include "comm/passed_descriptor.h"
#include "comm/rank_names.h"
#include "uniep/version.h"

namespace uniep {
namespace {

constexpr int kRetryMilliseconds = 5;
constexpr int kBacklog = 128;
constexpr std::size_t kMaxStrangers = 64;  // connections that have not said who they are

[[noreturn]] void refuse_system_call(const char* call, int error) {
  throw Error(Status::kDevice, std::string("meeting the other ranks: ") + call + ": " + std::strerror(error));
}

// What both ends of a connection say first.
struct Hello {
  std::array<char, 16> magic;
  uint32_t version;
  std::array<char, 16> kernels;
  int32_t rank;
  int32_t ranks;
  uint64_t member;
  std::array<uint64_t, 2> name;
};
constexpr std::array<char, 16> kHelloMagic = {'u', 'n', 'i', 'e', 'p', ' ', 'r', 'a',
                                              'n', 'k', ' ', 'm', 'e', 's', 'h', '2'};

std::array<char, 16> fixed_text(const std::string& text) {
  std::array<char, 16> fixed{};
  text.copy(fixed.data(), fixed.size() - 1);
  return fixed;
}

// Whatever came.
std::string printable(const std::array<char, 16>& fixed) {
  std::string text(fixed.data(), ::strnlen(fixed.data(), fixed.size()));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '?');
  return text;
}

struct Address {
  sockaddr_un address;
  socklen_t size;
};

// In the abstract namespace, which leaves nothing behind. A hash, because an address has 107 bytes.
Address address_of(const std::array<uint64_t, 2>& name, int rank) {
  Address of{};
  of.address.sun_family = AF_UNIX;
  const int length =
      std::snprintf(of.address.sun_path + 1, sizeof(of.address.sun_path) - 1, "uniep.%016llx%016llx.%d",
                    static_cast<unsigned long long>(name[0]), static_cast<unsigned long long>(name[1]), rank);
  of.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
  return of;
}

Descriptor new_socket() {
  Descriptor made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) refuse_system_call("socket", errno);
  return made;
}

// The process at the other end, if it is this user's or root's.
std::optional<pid_t> trusted_process(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return std::nullopt;
  if (credentials.uid != ::geteuid() && credentials.uid != 0) return std::nullopt;
  return credentials.pid;
}

uint64_t random_number() {
  uint64_t number = 0;
  while (::getrandom(&number, sizeof(number), 0) < 0 && errno == EINTR) continue;
  return number | 1;
}

// None where the system does not have them.
Descriptor process_descriptor(pid_t process) {
#ifdef SYS_pidfd_open
  if (process > 0) return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));  // close-on-exec
#endif
  return {};
}

// A connection on which a Hello is awaited.
struct Connection {
  Descriptor socket;
  pid_t process = 0;
  Hello hello{};
  std::size_t received = 0;
  Descriptor control;  // that came along
  bool pause = false;  // before the next attempt

  enum class State { kWaiting, kComplete, kClosed };
  State receive() {
    while (received < sizeof(hello)) {
      const ssize_t size = receive_with_descriptor(
          socket.number(), std::as_writable_bytes(std::span(&hello, 1)).subspan(received), control, nullptr);
      if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return State::kWaiting;
      if (size <= 0) return State::kClosed;
      received += static_cast<std::size_t>(size);
    }
    return State::kComplete;
  }
};

class Joining {
 public:
  Joining(const MeshBootstrap& bootstrap, const Deadline& deadline, std::vector<MeshLink>& links)
      : bootstrap_(bootstrap),
        deadline_(deadline),
        links_(links),
        own_{kHelloMagic,     UNIEP_VERSION,   fixed_text(bootstrap.kernels), bootstrap.rank,
             bootstrap.ranks, random_number(), name_hash(bootstrap.name)},
        lower_(static_cast<std::size_t>(bootstrap.rank)) {
    links_.resize(static_cast<std::size_t>(bootstrap.ranks));
    reasons_.resize(links_.size());
  }

  std::optional<MeshFailure> run() {
    try {
      meet();
      return std::nullopt;
    } catch (const MeshFailure& failure) {
      return failure;
    } catch (const Error& error) {
      return MeshFailure{error};
    }
  }

 private:
  void meet() {
    for (;;) {
      const std::vector<int> before = missing();
      if (before.empty()) {
        // Nobody goes on before all have met and the addresses are free again.
        listener_ = {};
        strangers_.clear();
        for (MeshLink& link : links_) link.tell_ready();
        if (not_ready().empty()) return;
      } else {
        listen();
        if (listener_) connect_to_lower();
      }
      wait();
      for (MeshLink& link : links_) look_at(link);
      accept_higher();
      hear_higher();
      hear_lower();
      if (deadline_.passed()) refuse_missing(before);
    }
  }

  // A death ends the meeting, and what no waiting mends: another build, a second process of a rank, no more
  // descriptors. One whose own time ran out, or that was told of a death in an earlier group, is awaited again.
  void look_at(MeshLink& link) {
    if (!link) return;
    const std::optional<MeshFailure> failure = link.failure();
    if (failure && failure->death != 0 && failure->news) throw MeshFailure(*failure);
    if (failure && failure->death == 0 && failure->error.status() != Status::kTimeout) throw MeshFailure(*failure);
    // What one says that may have gone on is about the group, and it may have left it.
    if (failure && link.may_have_gone_on()) throw MeshFailure(*failure);
    if (!failure && (!link.left() || link.may_have_gone_on())) return;
    const auto rank = static_cast<std::size_t>(link.peer());
    reasons_[rank] = failure ? failure->error.what() : "";
    link = {};
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < bootstrap_.ranks; ++rank) {
      if (rank != bootstrap_.rank && !links_[static_cast<std::size_t>(rank)].known()) ranks.push_back(rank);
    }
    return ranks;
  }

  std::vector<int> not_ready() const {
    std::vector<int> ranks;
    for (const MeshLink& link : links_) {
      if (link && !link.ready()) ranks.push_back(link.peer());
    }
    return ranks;
  }

  void refuse_missing(const std::vector<int>& ranks) const {
    if (ranks.empty()) {
      const std::vector<int> waiting = not_ready();
      if (waiting.empty()) return;
      throw Error(Status::kTimeout,
                  rank_names(waiting) + " did not come to all other ranks within " + deadline_.text());
    }
    if (!listener_) {
      throw Error(Status::kTimeout, "the place of rank " + std::to_string(bootstrap_.rank) +
                                        " was taken for all of the " + deadline_.text() +
                                        " of the wait: another process waits as the same rank of the same group");
    }
    std::vector<int> silent;
    for (const int rank : ranks) {
      if (reasons_[static_cast<std::size_t>(rank)].empty()) silent.push_back(rank);
    }
    if (silent.empty()) throw Error(Status::kTimeout, reasons_[static_cast<std::size_t>(ranks.front())]);
    throw Error(Status::kTimeout,
                rank_names(silent) + " did not come within " + deadline_.text() +
                    ": not started, stopped, or not a process of this user, host and network namespace");
  }

  void listen() {
    if (listener_ || bootstrap_.ranks == 1) return;
    Descriptor listener = new_socket();
    const Address own = address_of(own_.name, bootstrap_.rank);
    if (::bind(listener.number(), reinterpret_cast<const sockaddr*>(&own.address), own.size) != 0) {
      if (errno == EADDRINUSE) return;  // one that died a moment ago, or a stranger: until the deadline
      refuse_system_call("bind", errno);
    }
    if (::listen(listener.number(), kBacklog) != 0) refuse_system_call("listen", errno);
    listener_ = std::move(listener);
  }

  void connect_to_lower() {
    for (int rank = 0; rank < bootstrap_.rank; ++rank) {
      Connection& connection = lower_[static_cast<std::size_t>(rank)];
      if (connection.socket || links_[static_cast<std::size_t>(rank)] || std::exchange(connection.pause, false))
        continue;
      Descriptor socket = new_socket();
      const Address to = address_of(own_.name, rank);
      if (::connect(socket.number(), reinterpret_cast<const sockaddr*>(&to.address), to.size) != 0) continue;
      const std::optional<pid_t> process = trusted_process(socket.number());
      if (!process) continue;
      if (::send(socket.number(), &own_, sizeof(own_), MSG_NOSIGNAL) != sizeof(own_)) continue;
      connection.socket = std::move(socket);
      connection.process = *process;
    }
  }

  void wait() {
    std::vector<pollfd> open;
    bool retry = false;
    const auto add = [&open](int descriptor) { open.push_back({descriptor, POLLIN, 0}); };
    if (listener_) add(listener_.number());
    retry = !listener_ && !missing().empty();
    for (std::size_t rank = 0; rank < lower_.size(); ++rank) {
      if (lower_[rank].socket) add(lower_[rank].socket.number());
      retry = retry || (!lower_[rank].socket && !links_[rank]);
    }
    for (const Connection& connection : strangers_) add(connection.socket.number());
    for (const MeshLink& link : links_) {
      if (!link) continue;
      add(link.control());
      add(link.process());
    }
    const int limit = retry ? deadline_.milliseconds(kRetryMilliseconds) : deadline_.milliseconds();
    if (::poll(open.data(), open.size(), limit) < 0 && errno != EINTR) refuse_system_call("poll", errno);
  }

  void accept_higher() {
    while (listener_) {
      Descriptor socket(::accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        refuse_system_call("accept", errno);
      }
      const std::optional<pid_t> process = trusted_process(socket.number());
      if (!process) continue;
      if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
      Connection& connection = strangers_.emplace_back();
      connection.socket = std::move(socket);
      connection.process = *process;
    }
  }

  void hear_higher() {
    for (std::size_t i = 0; i < strangers_.size();) {
      const Connection::State state = strangers_[i].receive();
      if (state == Connection::State::kWaiting) {
        ++i;
        continue;
      }
      Connection connection = std::move(strangers_[i]);
      strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i));
      if (state == Connection::State::kComplete && connection.hello.magic == kHelloMagic) answer(std::move(connection));
    }
  }

  // Takes a higher rank in, giving it one end of the second connection.
  void answer(Connection connection) {
    const Hello& theirs = connection.hello;
    const std::string fault = fault_of(theirs, bootstrap_.rank + 1, bootstrap_.ranks - 1);
    if (!fault.empty()) {
      send_with_descriptor(connection.socket.number(), std::as_bytes(std::span(&own_, 1)), -1);  // it sees the same
      throw Error(Status::kInvalidArgument, fault);
    }
    MeshLink& link = links_[static_cast<std::size_t>(theirs.rank)];
    look_at(link);
    if (link) {
      throw Error(Status::kInvalidArgument,
                  "rank " + std::to_string(theirs.rank) + " came twice: two processes have the same rank");
    }
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
      refuse_system_call("socketpair", errno);
    }
    Descriptor control(ends[0]);
    const Descriptor other_end(ends[1]);
    const ssize_t size = send_with_descriptor(connection.socket.number(), std::as_bytes(std::span(&own_, 1)), ends[1]);
    if (size != sizeof(own_)) return;  // it is gone again, and may come back
    link = MeshLink(theirs.rank, theirs.member, std::move(connection.socket), std::move(control),
                    process_descriptor(connection.process));
  }

  void hear_lower() {
    for (std::size_t rank = 0; rank < lower_.size(); ++rank) {
      Connection& connection = lower_[rank];
      if (!connection.socket) continue;
      const Connection::State state = connection.receive();
      if (state == Connection::State::kWaiting) continue;
      Connection done = std::move(connection);
      connection = {};
      connection.pause = true;
      if (state == Connection::State::kClosed || done.hello.magic != kHelloMagic) continue;
      const std::string fault = fault_of(done.hello, static_cast<int>(rank), static_cast<int>(rank));
      if (!fault.empty()) throw Error(Status::kInvalidArgument, fault);
      if (!done.control) continue;
      MeshLink& link = links_[rank];
      link = MeshLink(static_cast<int>(rank), done.hello.member, std::move(done.socket), std::move(done.control),
                      process_descriptor(done.process));
      link.set_known();
      link.tell_known();
    }
  }

  // Why the one that says `theirs` can not be of this group, its rank being from `first` to `last`; empty if it can.
  std::string fault_of(const Hello& theirs, int first, int last) const {
    const std::string who = "rank " + std::to_string(theirs.rank);
    if (theirs.version != own_.version) {
      return who + " has version " + std::to_string(theirs.version) + " of the library, this process version " +
             std::to_string(own_.version) + "; all ranks must have the same";
    }
    if (theirs.kernels != own_.kernels) {
      return who + " has kernels " + printable(theirs.kernels) + ", this process kernels " + printable(own_.kernels) +
             ", of other sources; all ranks must run one build of the library";
    }
    if (theirs.ranks != own_.ranks) {
      return who + " says that the group has " + std::to_string(theirs.ranks) + " ranks, rank " +
             std::to_string(own_.rank) + " that it has " + std::to_string(own_.ranks);
    }
    if (theirs.name != own_.name || theirs.rank < first || theirs.rank > last) {
      return "a process that says it is " + who + " came where one from " + std::to_string(first) + " to " +
             std::to_string(last) + " was awaited";
    }
    return {};
  }

  const MeshBootstrap& bootstrap_;
  const Deadline& deadline_;
  std::vector<MeshLink>& links_;
  const Hello own_;
  Descriptor listener_;
  std::vector<Connection> lower_;      // to lower ranks, until they have answered
  std::vector<std::string> reasons_;   // why a rank that had come is awaited again
  std::vector<Connection> strangers_;  // that have not said who they are
};

}  // namespace

std::optional<MeshFailure> join_mesh(const MeshBootstrap& bootstrap, const Deadline& deadline,
                                     std::vector<MeshLink>& links) {
  return Joining(bootstrap, deadline, links).run();
}

}  // namespace uniep
