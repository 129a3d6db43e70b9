// The sockets between the processes of a group: meeting, exchanges, and what every rank hears when one of them fails.
#include "comm/rank_mesh.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <fstream>
#include <functional>
#include <memory>
#include <random>

#include "comm/name_hash.h"
#include "support/expect_error.h"
#include "support/processes.h"

namespace uniep::test {
namespace {

constexpr double kLong = 20;
// Of the bytes of an exchange: a part of them waits for the receiver (net.core.wmem_default is 212,992).
constexpr std::size_t kMoreThanASocketHolds = std::size_t{1} << 19;

std::string fresh_name() {
  static int count = 0;
  return "rank_mesh_test " + std::to_string(::getpid()) + " " + std::to_string(++count);
}

using Body = std::function<void(RankMesh&, const Reporter&)>;

// A process a rank in a mesh with these limits; errors of the meeting are a line.
std::vector<Process> start(const std::string& name, int ranks, double join, double wait, const Body& body,
                           int first = 0) {
  std::vector<Process> processes;
  for (int rank = first; rank < ranks; ++rank) {
    processes.emplace_back([&](const Reporter& reporter) {
      reporter.line(reporter.error_of([&] {
        RankMesh mesh({rank, ranks, name}, join, wait);
        body(mesh, reporter);
      }));
    });
  }
  return processes;
}

void expect_lines(std::vector<Process>& processes, const std::string& text) {
  for (std::size_t i = 0; i < processes.size(); ++i) EXPECT_EQ(processes[i].line(), text) << "process " << i;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::byte> pattern(int rank, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((i * 7 + i / 251 + rank * 31) & 255);
  return bytes;
}

Descriptor file_with(int number) {
  Descriptor file(::memfd_create("rank_mesh_test", MFD_CLOEXEC));
  if (::write(file.number(), &number, sizeof(number)) != sizeof(number)) throw std::runtime_error("memfd");
  return file;
}

int number_in(const Descriptor& file) {
  int number = -1;
  return ::pread(file.number(), &number, sizeof(number), 0) == sizeof(number) ? number : -1;
}

// One of each kind of exchange; returns what was wrong.
std::string exchange_all(RankMesh& mesh, std::size_t bytes) {
  mesh.barrier();
  const std::vector<std::byte> own = pattern(mesh.rank(), bytes + static_cast<std::size_t>(mesh.rank()));
  const std::vector<std::vector<std::byte>> all = mesh.all_gather(own);
  for (int peer = 0; peer < mesh.ranks(); ++peer) {
    if (all[static_cast<std::size_t>(peer)] != pattern(peer, bytes + static_cast<std::size_t>(peer)))
      return "all_gather";
  }
  const std::vector<Descriptor> files = mesh.all_gather_descriptors(file_with(mesh.rank() + 100).number());
  for (int peer = 0; peer < mesh.ranks(); ++peer) {
    const Descriptor& file = files[static_cast<std::size_t>(peer)];
    if (peer == mesh.rank() ? static_cast<bool>(file) : number_in(file) != peer + 100) return "all_gather_descriptors";
  }
  mesh.agree({});
  return "right";
}

TEST(RankMesh, AllRanksMeetAndExchange) {
  for (const int ranks : {1, 2, 4, 8}) {
    auto processes = start(fresh_name(), ranks, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
      reporter.line(exchange_all(mesh, 1000));
      reporter.line(exchange_all(mesh, 0));
    });
    expect_lines(processes, "right");
    expect_lines(processes, "right");
    expect_lines(processes, "none");
  }
}

// All hear of it at once, though the one that is refused stays, and so do those that it has met.
TEST(RankMesh, RanksOfAnotherBuildAreRefusedByName) {
  const auto kernels = [](int rank) { return rank == 1 ? "0a1b2c3d" : "1f3870be"; };
  for (const int ranks : {2, 4}) {
    const std::string name = fresh_name();
    std::vector<Process> processes;
    for (int rank = 0; rank < ranks; ++rank) {
      processes.emplace_back([&, rank](const Reporter& reporter) {
        if (rank == 1) ::usleep(200'000);  // the others have met
        reporter.line(reporter.error_of([&] {
          const RankMesh mesh({rank, ranks, name, kernels(rank)}, kLong, kLong);
        }));
        ::pause();
      });
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string line = processes[static_cast<std::size_t>(rank)].line();
      EXPECT_TRUE(has(line, ", of other sources; all ranks must run one build of the library")) << line;
      if (ranks > 2) continue;
      EXPECT_TRUE(has(line, fmt::format("rank {} has kernels {}, this process kernels {}", 1 - rank, kernels(1 - rank),
                                        kernels(rank))))
          << line;
    }
  }
}

TEST(RankMesh, LargeExchangesDoNotWaitForEachOther) {
  auto processes = start(fresh_name(), 4, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    for (int i = 0; i < 3; ++i) reporter.line(exchange_all(mesh, std::size_t{8} << 20));
  });
  for (int i = 0; i < 3; ++i) expect_lines(processes, "right");
}

TEST(RankMesh, OneNameServesOneGroupAfterAnother) {
  const std::string name = fresh_name();
  std::vector<Process> processes;
  for (int rank = 0; rank < 3; ++rank) {
    processes.emplace_back([&](const Reporter& reporter) {
      std::vector<std::unique_ptr<RankMesh>> meshes;
      for (int i = 0; i < 20; ++i) {
        meshes.push_back(std::make_unique<RankMesh>(MeshBootstrap{rank, 3, name}, kLong, kLong));
        if (i % 3 == 0) meshes.erase(meshes.begin());
      }
      for (const auto& mesh : meshes) reporter.line(exchange_all(*mesh, 100));
    });
  }
  for (int i = 0; i < 13; ++i) expect_lines(processes, "right");
}

TEST(RankMesh, AMissingRankIsNamedInTime) {
  for (const std::vector<int>& missing : {std::vector<int>{0}, {2}, {1, 3}}) {
    const std::string name = fresh_name();
    const double begin = monotonic_seconds();
    std::vector<Process> processes;
    for (int rank = 0; rank < 4; ++rank) {
      if (std::find(missing.begin(), missing.end(), rank) != missing.end()) continue;
      processes.emplace_back([&, rank](const Reporter& reporter) {
        reporter.line(reporter.error_of([&] { const RankMesh mesh({rank, 4, name}, 0.5, 0.5); }));
      });
    }
    const std::string names = missing.size() == 1 ? "rank " + std::to_string(missing[0]) : "ranks 1 and 3";
    for (Process& process : processes) {
      const std::string line = process.line();
      EXPECT_TRUE(has(line, "time-out: " + names + " did not come within 0.5 s")) << line;
    }
    EXPECT_LT(monotonic_seconds() - begin, 0.5 + kSlackSeconds);
  }
}

TEST(RankMesh, AStoppedRankIsNamedInTimeAndTheOthersGoOnTogether) {
  auto processes = start(fresh_name(), 3, kLong, 0.5, [](RankMesh& mesh, const Reporter& reporter) {
    reporter.line("met");
    if (mesh.rank() == 2) ::raise(SIGSTOP);
    for (const char* again : {"", "again "}) {
      const double begin = monotonic_seconds();
      reporter.line(again + reporter.error_of([&] { mesh.barrier(); }));
      reporter.line(monotonic_seconds() - begin < 0.5 + kSlackSeconds ? "in time" : "late");
    }
    reporter.line(mesh.peer_failure());
  });
  expect_lines(processes, "met");
  const std::string expected = "time-out: rank 2 did not take part in barrier 1 within 0.5 s";
  for (int rank = 0; rank < 2; ++rank) {
    Process& process = processes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(process.line(), expected);
    EXPECT_EQ(process.line(), "in time");
    EXPECT_EQ(process.line(), "again " + expected);
    EXPECT_EQ(process.line(), "in time");
    EXPECT_EQ("time-out: " + process.line(), expected);
  }
  processes[2].signal(SIGCONT);  // it hears what the others have decided
  EXPECT_EQ(processes[2].line(), expected);
}

TEST(RankMesh, AFailureIsToldAtOnce) {
  auto processes = start(fresh_name(), 4, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    if (mesh.rank() == 1) {
      ::usleep(100'000);
      mesh.fail("the router has a NaN");
      mesh.fail("another one");
    }
    if (mesh.rank() == 3) {
      while (mesh.peer_failure().empty()) ::usleep(1000);
      reporter.line("device error: " + mesh.peer_failure());
    } else {
      reporter.line(reporter.error_of([&] { mesh.all_gather(pattern(0, 5'000'000)); }));
    }
  });
  expect_lines(processes, "device error: rank 1 failed: the router has a NaN");
}

TEST(RankMesh, LeavingIsNoFailureUnlessSomebodyWaits) {
  auto processes = start(fresh_name(), 3, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    mesh.barrier();
    if (mesh.rank() == 1) return;
    while (mesh.peer_that_left() < 0) ::usleep(1000);
    reporter.line(std::to_string(mesh.peer_that_left()) + mesh.peer_failure());
    ::usleep(200'000);
    reporter.line(reporter.error_of([&] { mesh.barrier(); }));
  });
  for (const std::size_t rank : {0, 2}) {
    EXPECT_EQ(processes[rank].line(), "1");
    EXPECT_EQ(processes[rank].line(), "device error: rank 1 left the group before barrier 2 was over");
  }
}

TEST(RankMesh, AgreementIsTheSameErrorOnAllRanksAndTheMeshGoesOn) {
  auto processes = start(fresh_name(), 4, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    const int rank = mesh.rank();
    const Problem own = rank == 2   ? Problem{Status::kOutOfMemory, "no room for 5 bytes"}
                        : rank == 3 ? Problem{Status::kDevice, "another"}
                                    : Problem{};
    reporter.line(reporter.error_of([&] { mesh.agree(own); }));
    reporter.line(reporter.error_of([&] { mesh.agree({}); }));
    reporter.line(exchange_all(mesh, 10));
  });
  const std::string expected = std::string(status_name(Status::kOutOfMemory)) + ": rank 2: no room for 5 bytes";
  expect_lines(processes, expected);
  expect_lines(processes, "none");
  expect_lines(processes, "right");
}

// Rank 1 has failed alone, before or behind its part in an exchange that the others are in, or before they come to one.
TEST(RankMesh, ARankThatBeginsAgainEndsTheExchangesOfTheOthers) {
  constexpr int kRounds = 24;
  constexpr std::size_t kSizes[] = {0, 100, kMoreThanASocketHolds};
  auto processes = start(fresh_name(), 3, kLong, kLong, [&](RankMesh& mesh, const Reporter& reporter) {
    std::string wrong;
    for (int round = 0; round < kRounds && wrong.empty(); ++round) {
      const std::size_t size = kSizes[round % 3];
      const std::vector<std::byte> own = pattern(mesh.rank(), size);
      if (round % 4 == 1) mesh.all_gather(own);  // one that all take part in
      if (round % 4 == 2 && mesh.rank() == 1) ::usleep(20000);
      const auto exchange = [&] {
        round % 2 == 0 ? static_cast<void>(mesh.all_gather(own))
                       : static_cast<void>(mesh.all_gather_descriptors(file_with(1).number()));
      };
      if (mesh.rank() != 1) {
        if (round % 4 == 3) ::usleep(20000);
        for (const int again : {0, 1}) {  // and so is what they try next
          const std::string end = reporter.error_of(exchange);
          if (!has(end, " gave up a call that failed there, and waits in recover()"))
            wrong = end + " " + std::to_string(again);
        }
        if (mesh.awaiting_rank() != 1 && mesh.awaiting_rank() != 2 - mesh.rank()) wrong = "nobody waits";
      }
      mesh.begin_again();
      if (mesh.awaiting_rank() != -1) wrong = "somebody waits";
      const std::string then = exchange_all(mesh, size);
      if (then != "right") wrong = then;
    }
    reporter.line(wrong.empty() ? "right" : wrong);
  });
  expect_lines(processes, "right");
  expect_lines(processes, "none");
}

// As above, but it says so before it begins anew, and why. What all refuse ends nothing, nor what is of no call.
TEST(RankMesh, ARankThatRefusesACallEndsTheExchangesOfThat) {
  auto processes = start(fresh_name(), 3, kLong, kLong, [&](RankMesh& mesh, const Reporter& reporter) {
    std::string wrong;
    uint32_t call = 0;
    for (int round = 0; round < 12 && wrong.empty(); ++round) {  // each size with each way to be late
      const std::size_t size = round % 3 == 0 ? 100 : kMoreThanASocketHolds;
      for (int i = 0; i < 20; ++i) mesh.refuse(++call, "all refuse it");
      mesh.refuse(++call, "it is of no exchange");
      if (exchange_all(mesh, size) != "right") wrong = "an exchange of no call";
      const RankMesh::OfCall of_call(&mesh, ++call);
      const std::string why = "why in round " + std::to_string(round);
      if (mesh.rank() == 1) {
        if (round % 4 == 2) ::usleep(20000);
        mesh.refuse(call, why);
      }
      for (int again = 0; again < 2 && mesh.rank() != 1; ++again) {
        if (round % 4 == 3) ::usleep(20000);
        const std::string end = reporter.error_of([&] { mesh.all_gather(pattern(mesh.rank(), size)); });
        if (!has(end, "rank 1 refused the call: " + why + "; recover() makes the group usable again")) wrong = end;
      }
      mesh.begin_again();
      const RankMesh::OfCall of_next(&mesh, ++call);
      if (exchange_all(mesh, size) != "right") wrong = "the next call";
    }
    reporter.line(wrong.empty() ? "right" : wrong);
  });
  expect_lines(processes, "right");
  expect_lines(processes, "none");
}

TEST(RankMesh, ARankThatDoesNotBeginAgainIsNamedInTime) {
  auto processes = start(fresh_name(), 2, kLong, 0.5, [](RankMesh& mesh, const Reporter& reporter) {
    if (mesh.rank() == 1) ::usleep(1500000);
    reporter.line(reporter.error_of([&] { mesh.begin_again(); }));
  });
  const std::string first = processes[0].line();
  EXPECT_TRUE(has(first, "rank 1 did not take part in begin_again 1 within 0.5 s")) << first;
}

TEST(RankMesh, DifferentCallsAreAnErrorThatNamesBoth) {
  auto processes = start(fresh_name(), 3, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    reporter.line(reporter.error_of([&] {
      if (mesh.rank() == 1) {
        mesh.all_gather({});
      } else {
        mesh.barrier();
      }
    }));
  });
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_TRUE(has(line, "barrier 1") && has(line, "all_gather 1") && has(line, "rank 1")) << line;
    EXPECT_EQ(line.rfind(status_name(Status::kInvalidArgument), 0), 0U) << line;
  }
}

TEST(RankMesh, RanksOfDifferentGroupsAreRefused) {
  const std::string name = fresh_name();
  std::vector<Process> processes;
  for (const int ranks : {2, 3}) {
    processes.emplace_back([&](const Reporter& reporter) {
      reporter.line(reporter.error_of([&] { const RankMesh mesh({ranks - 2, ranks, name}, 2, 2); }));
    });
  }
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_TRUE(has(line, "2 ranks") || has(line, "it has 2")) << line;
    EXPECT_TRUE(has(line, "3 ranks") || has(line, "it has 3")) << line;
  }
  expect_error(Status::kInvalidArgument, "rank: 4; must be 0 to 3", [] { const RankMesh mesh({4, 4, "x"}, 1, 1); });
  expect_error(Status::kInvalidArgument, "ranks: 0; must be", [] { const RankMesh mesh({0, 0, "x"}, 1, 1); });
}

TEST(RankMesh, TwoProcessesOfOneRankAreNotTwoRanks) {
  const std::string name = fresh_name();
  std::vector<Process> processes;
  for (const double limit : {1.0, 0.3}) {
    processes.emplace_back([&](const Reporter& reporter) {
      ::usleep(limit < 1 ? 200'000 : 0);
      reporter.line(reporter.error_of([&] { const RankMesh mesh({0, 2, name}, limit, limit); }));
    });
  }
  const std::string both = processes[0].line() + processes[1].line();
  EXPECT_TRUE(has(both, "another process waits as the same rank")) << both;
  EXPECT_TRUE(has(both, "rank 1 did not come")) << both;
}

TEST(RankMesh, ADescriptorThatARankCanNotTakeIsAnErrorOnAll) {
  auto processes = start(fresh_name(), 2, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    const Descriptor own = file_with(1);
    // UBSan needs a pipe for the first look at an object's type.
    EXPECT_EQ(problem_in([] { throw Error(Status::kInternal, "first"); }).text, "first");
    std::vector<Descriptor> taken;
    while (mesh.rank() == 1) {
      taken.emplace_back(::fcntl(own.number(), F_DUPFD_CLOEXEC, 0));
      if (!taken.back()) break;
    }
    reporter.line(reporter.error_of([&] { mesh.all_gather_descriptors(own.number()); }));
  });
  const std::string expected = std::string(status_name(Status::kOutOfMemory)) +
                               ": rank 1 can not take the descriptor of rank 0: too many files are open";
  EXPECT_EQ(processes[1].line(), expected);
  const std::string other = processes[0].line();  // it has got rank 1's, maybe before rank 1 failed
  EXPECT_TRUE(other == expected || other == "none") << other;
}

TEST(RankMesh, AForkedChildIsNoRankAndDoesNotHideADeath) {
  auto processes = start(fresh_name(), 2, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    if (mesh.rank() == 1) {
      if (::fork() == 0) {
        reporter.line(reporter.error_of([&] { mesh.barrier(); }));
        ::sleep(5);
        ::_exit(0);
      }
      mesh.barrier();
      ::usleep(200'000);
      ::raise(SIGKILL);
    }
    mesh.barrier();
    const double begin = monotonic_seconds();
    reporter.line(reporter.error_of([&] { mesh.barrier(); }));
    reporter.line(monotonic_seconds() - begin < 1 + kSlackSeconds ? "in time" : "late");
  });
  EXPECT_EQ(processes[0].line(), "device error: rank 1 ended (its process is gone)");
  EXPECT_EQ(processes[0].line(), "in time");
  const std::string child = processes[1].line();
  EXPECT_TRUE(has(child, "forked child")) << child;
}

TEST(RankMesh, AForkedChildTakesNoWordsFromItsParent) {
  auto processes = start(fresh_name(), 2, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) {
    mesh.barrier();
    if (mesh.rank() == 0) {
      ::usleep(100'000);
      return mesh.fail("the router has a NaN");
    }
    const pid_t child = ::fork();
    if (child == 0) {
      bool heard = false;
      for (int i = 0; i < 200; ++i, ::usleep(1000)) heard |= !mesh.peer_failure().empty();
      ::_exit(heard ? 1 : 0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    reporter.line(status == 0 ? "heard nothing" : "heard its parent's words");
    while (mesh.peer_failure().empty()) ::usleep(1000);
    reporter.line(mesh.peer_failure());
  });
  EXPECT_EQ(processes[1].line(), "heard nothing");
  EXPECT_EQ(processes[1].line(), "rank 0 failed: the router has a NaN");
}

// ---- Strangers

// Where a rank of the mesh of that name listens, once it does; empty where it never does. Other meshes are on the host,
// those of tests beside this one.
std::string address_of_mesh(const std::string& name, int rank) {
  const std::array<uint64_t, 2> hash = name_hash(name);
  std::string address = fmt::format("uniep.{:016x}{:016x}.{}", hash[0], hash[1], rank);
  const Deadline deadline(5);
  while (!deadline.passed()) {
    std::ifstream sockets("/proc/net/unix");
    for (std::string line; std::getline(sockets, line);) {
      if (line.ends_with("@" + address)) return address;
    }
    ::usleep(1000);
  }
  return "";
}

Descriptor connection_to(const std::string& address) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::copy(address.begin(), address.end(), to.sun_path + 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
  if (::connect(socket.number(), reinterpret_cast<const sockaddr*>(&to), size) != 0) return {};
  return socket;
}

TEST(RankMesh, StrangersDoNotHoldUpAMeeting) {
  const std::string name = fresh_name();
  std::vector<Process> first;
  first.emplace_back([&](const Reporter& reporter) {
    RankMesh mesh({0, 3, name}, kLong, kLong);
    reporter.line(exchange_all(mesh, 100));
  });
  const std::string address = address_of_mesh(name, 0);
  ASSERT_FALSE(address.empty());
  std::vector<Descriptor> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(connection_to(address));
  for (const std::string& garbage : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(10'000, 'x')}) {
    const Descriptor talker = connection_to(address);
    const bool sent = ::send(talker.number(), garbage.data(), garbage.size(), MSG_NOSIGNAL) > 0;
    // The mesh may have hung up by now: so many strangers are there.
    EXPECT_TRUE(sent || errno == EPIPE || errno == ECONNRESET) << errno;
  }
  auto others = start(
      name, 3, kLong, kLong, [](RankMesh& mesh, const Reporter& reporter) { reporter.line(exchange_all(mesh, 100)); },
      1);
  EXPECT_EQ(first[0].line(), "right");
  expect_lines(others, "right");
}

TEST(RankMesh, AnotherUsersProcessIsNoRank) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  constexpr uid_t kNobody = 65534;
  const std::string name = fresh_name();
  std::vector<Process> processes;
  // Another user holds the place of rank 0 and speaks first as rank 2.
  processes.emplace_back([&](const Reporter& reporter) {
    reporter.line(reporter.error_of([&] {
      if (::setresuid(kNobody, kNobody, kNobody) != 0) throw Error(Status::kInternal, "setresuid");
      const RankMesh mesh({2, 3, name}, 1, 1);
    }));
  });
  processes.emplace_back([&](const Reporter& reporter) {
    reporter.line(reporter.error_of([&] { const RankMesh mesh({1, 3, name}, 1, 1); }));
  });
  // Root may be anybody's peer, but is not taken in by one that it does not trust itself.
  EXPECT_TRUE(has(processes[0].line(), "time-out: rank"));
  EXPECT_TRUE(has(processes[1].line(), "time-out: ranks 0 and 2 did not come within 1 s"));
}

// ---- Ranks that are killed or stopped at random moments

constexpr double kJoinLimit = 2, kWaitLimit = 1;

void exchange_for_ever(RankMesh& mesh) {
  for (;;) exchange_all(mesh, 200'000);
}

// Two survivors and a victim. What the survivors say first is the error that they end with.
struct Trio {
  explicit Trio(const std::string& name) {
    for (int rank = 0; rank < 3; ++rank) {
      processes.emplace_back([&](const Reporter& reporter) {
        reporter.line(reporter.error_of([&] {
          RankMesh mesh({rank, 3, name}, kJoinLimit, kWaitLimit);
          exchange_for_ever(mesh);
        }));
        reporter.line(std::to_string(monotonic_seconds()));
        RankMesh again({rank, 3, name}, kLong, kLong);
        reporter.line(exchange_all(again, 1000));
      });
    }
  }
  std::vector<Process> processes;
};

void disturb(const std::string& name, int signal, int victim, int microseconds) {
  Trio trio(name);
  ::usleep(static_cast<useconds_t>(microseconds));
  trio.processes[static_cast<std::size_t>(victim)].signal(signal);
  const double begin = monotonic_seconds();
  const std::string names = "rank " + std::to_string(victim);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim) continue;
    Process& survivor = trio.processes[static_cast<std::size_t>(rank)];
    const std::string line = survivor.line();
    const double seconds = std::stod("0" + survivor.line()) - begin;
    EXPECT_TRUE(has(line, names + " ended") || (has(line, "did not") && has(line, std::to_string(victim))))
        << line << " after " << microseconds;
    // One that the victim had not met yet can only wait for it.
    const double limit = has(line, "ended") ? 0 : has(line, "come") || has(line, "join") ? kJoinLimit : kWaitLimit;
    EXPECT_LT(seconds, limit + kSlackSeconds) << line;
  }
  trio.processes[static_cast<std::size_t>(victim)].end();
  trio.processes[static_cast<std::size_t>(victim)] = Process([&](const Reporter& reporter) {
    RankMesh again({victim, 3, name}, kLong, kLong);
    reporter.line(exchange_all(again, 1000));
  });
  expect_lines(trio.processes, "right");
}

// The first moments are those of the meeting.
int moment_of(int round, std::mt19937& random) {
  return static_cast<int>(random() % (round % 2 == 0 ? 4'000 : 60'000));
}

// Four rounds side by side: most of their time is waiting.
void disturb_at_random_moments(int signal, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Process> rounds;
  for (int round = 0; round < 20; ++round) {
    const int moment = moment_of(round, random);
    const std::string name = fresh_name();
    rounds.emplace_back([&](const Reporter& reporter) {
      disturb(name, signal, round % 3, moment);
      reporter.line(testing::Test::HasFailure() ? "failed" : "passed");
    });
    if (rounds.size() < 4) continue;
    expect_lines(rounds, "passed");
    rounds.clear();
  }
}

TEST(RankMesh, SurvivorsOfAKilledRankNameItAtOnceAndMeetItsSuccessor) {
  disturb_at_random_moments(SIGKILL, 1);
}

TEST(RankMesh, AStoppedRankIsNamedWithinTheLimitAtAnyMoment) {
  disturb_at_random_moments(SIGSTOP, 2);
}

}  // namespace
}  // namespace uniep::test
