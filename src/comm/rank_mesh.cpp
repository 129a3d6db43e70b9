#include "comm/rank_mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "comm/mesh_join.h"
#include "comm/passed_descriptor.h"
#include "comm/rank_names.h"

namespace uniep {
namespace {

constexpr int kAskMilliseconds = 100;
constexpr uint64_t kMaxBytes = uint64_t{1} << 36;

const MeshBootstrap& checked(const MeshBootstrap& bootstrap) {
  if (bootstrap.ranks < 1 || bootstrap.ranks > RankMesh::kMaxRanks) {
    throw Error(Status::kInvalidArgument,
                "ranks: " + std::to_string(bootstrap.ranks) + "; must be 1 to " + std::to_string(RankMesh::kMaxRanks));
  }
  if (bootstrap.rank < 0 || bootstrap.rank >= bootstrap.ranks) {
    throw Error(Status::kInvalidArgument,
                "rank: " + std::to_string(bootstrap.rank) + "; must be 0 to " + std::to_string(bootstrap.ranks - 1));
  }
  return bootstrap;
}

// A rank that this one is in a collective with has begun anew, or refused the call that it is of.
struct Awaited {
  int rank;
};

}  // namespace

// What is under way between two ranks where one has left a collective half-way: the other one reads its messages whole.
struct RankMesh::Left {
  std::vector<std::byte> out;  // still to be sent
  Header header_in{};
  std::size_t received = 0;  // of the header and what follows it
};

// One rank's part of a collective: what goes to it and what comes from it.
struct RankMesh::Transfer {
  int peer = -1;
  std::vector<std::byte> left_out;  // before the header
  Header header_out{};
  std::span<const std::byte> out;
  int descriptor_out = -1;
  std::size_t sent = 0;  // of all three

  Header header_in{};
  std::vector<std::byte> in;
  Descriptor descriptor_in;
  std::size_t received = 0;
  bool closed = false;

  bool sends() const { return peer >= 0 && !rest().empty(); }
  // What is sent next, in one piece.
  std::span<const std::byte> rest() const {
    std::size_t begin = sent;
    for (const std::span<const std::byte> part : {std::span(left_out), std::as_bytes(std::span(&header_out, 1)), out}) {
      if (begin < part.size()) return part.subspan(begin);
      begin -= part.size();
    }
    return {};
  }
  bool receives() const {
    return peer >= 0 && (received < sizeof(Header) || received < sizeof(Header) + header_in.bytes);
  }
  bool complete() const { return !sends() && !receives(); }
};

RankMesh::RankMesh(const MeshBootstrap& bootstrap, double join_seconds, double wait_seconds)
    : rank_(checked(bootstrap).rank),
      ranks_(bootstrap.ranks),
      wait_seconds_(wait_seconds),
      owner_(::getpid()),
      left_(static_cast<std::size_t>(bootstrap.ranks)) {
  const Deadline deadline(join_seconds);
  if (const std::optional<MeshFailure> failure = join_mesh(bootstrap, deadline, links_)) {
    throw Error(break_with(*failure));
  }
}

RankMesh::~RankMesh() {
  if (::getpid() != owner_ || broken_) return;
  for (MeshLink& link : links_) link.tell_left();
}

std::vector<std::vector<std::byte>> RankMesh::all_gather(std::span<const std::byte> own, double seconds) {
  std::vector<Transfer> transfers = run_collective(Kind::kAllGather, own, -1, deadline_of(seconds));
  std::vector<std::vector<std::byte>> all;
  for (Transfer& transfer : transfers) all.push_back(std::move(transfer.in));
  all[static_cast<std::size_t>(rank_)].assign(own.begin(), own.end());
  return all;
}

void RankMesh::barrier(double seconds) {
  run_collective(Kind::kBarrier, {}, -1, deadline_of(seconds));
}

std::vector<Descriptor> RankMesh::all_gather_descriptors(int own, double seconds) {
  const std::byte given{static_cast<unsigned char>(own >= 0 ? 1 : 0)};
  std::vector<Transfer> transfers = run_collective(Kind::kDescriptors, std::span(&given, 1), own, deadline_of(seconds));
  std::vector<Descriptor> all;
  for (Transfer& transfer : transfers) all.push_back(std::move(transfer.descriptor_in));
  return all;
}

void RankMesh::agree(const Problem& own, double seconds) {
  const auto status = static_cast<int32_t>(own.status);
  std::vector<std::byte> bytes(sizeof(status) + own.text.size());
  std::memcpy(bytes.data(), &status, sizeof(status));
  std::copy_n(reinterpret_cast<const std::byte*>(own.text.data()), own.text.size(), bytes.begin() + sizeof(status));
  std::vector<Transfer> transfers = run_collective(Kind::kAgree, bytes, -1, deadline_of(seconds));
  transfers[static_cast<std::size_t>(rank_)].in = bytes;
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::vector<std::byte>& told = transfers[static_cast<std::size_t>(rank)].in;
    int32_t theirs = static_cast<int32_t>(Status::kInternal);
    if (told.size() >= sizeof(theirs)) std::memcpy(&theirs, told.data(), sizeof(theirs));
    if (theirs == static_cast<int32_t>(Status::kOk)) continue;
    const auto* const text = reinterpret_cast<const char*>(told.data()) + sizeof(theirs);
    throw Error(static_cast<Status>(theirs),
                "rank " + std::to_string(rank) + ": " + std::string(text, told.size() - sizeof(theirs)));
  }
}

void RankMesh::begin_again(double seconds) {
  const std::vector<Transfer> transfers = run_collective(Kind::kBeginAgain, {}, -1, deadline_of(seconds));
  for (const Transfer& transfer : transfers) sequence_ = std::max(sequence_, transfer.header_in.sequence);
  awaiting_ = -1;
  refusal_.clear();
}

void RankMesh::refuse(uint32_t call, const std::string& why) noexcept {
  if (broken_ || ::getpid() != owner_) return;
  for (MeshLink& link : links_) link.tell_refused(call, why.c_str());
}

bool RankMesh::has_refused(const MeshLink& link) const {
  return call_ && link.refusal() && static_cast<int32_t>(link.refusal()->call - *call_) >= 0;
}

void RankMesh::fail(const std::string& why) noexcept {
  if (broken_ || ::getpid() != owner_) return;
  try {
    break_with({Error(Status::kDevice, "rank " + std::to_string(rank_) + " failed: " + why)});
  } catch (...) {  // no memory for the text: its end will tell them
  }
}

std::string RankMesh::peer_failure() {
  if (!broken_ && ::getpid() == owner_) {  // a forked child would take the words away from its parent
    if (const std::optional<MeshFailure> failure = failure_of_peers()) break_with(*failure);
  }
  return broken_ ? broken_->error.what() : "";
}

int RankMesh::peer_that_left() {
  peer_failure();
  for (const MeshLink& link : links_) {
    if (link && link.left()) return link.peer();
  }
  return -1;
}

// ---- A collective

std::string RankMesh::name_of(const Header& header) {
  static constexpr std::array<const char*, 6> kNames = {"?",     "all_gather", "barrier", "all_gather_descriptors",
                                                        "agree", "begin_again"};
  const auto kind = static_cast<std::size_t>(header.kind);
  return std::string(kNames[kind < kNames.size() ? kind : 0]) + " " + std::to_string(header.sequence);
}

// Ends the mesh here and tells all others why.
const Error& RankMesh::break_with(const MeshFailure& failure) noexcept {
  if (!broken_) {
    broken_ = failure;
    for (MeshLink& link : links_) link.tell_failure(failure);
  }
  return broken_->error;
}

std::vector<RankMesh::Transfer> RankMesh::run_collective(Kind kind, std::span<const std::byte> own, int descriptor,
                                                         const Deadline& deadline) {
  if (::getpid() != owner_) {
    throw Error(Status::kInvalidArgument, "a group of several processes was used in a forked child of one of them");
  }
  if (broken_) throw Error(broken_->error);
  const bool begins_again = kind == Kind::kBeginAgain;
  if (awaiting_ >= 0 && !begins_again) throw_left();
  const Header header{kind, 0, ++sequence_, own.size()};
  std::vector<Transfer> transfers(static_cast<std::size_t>(ranks_));
  try {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      Transfer& transfer = transfers[static_cast<std::size_t>(peer)];
      transfer.peer = peer;
      transfer.header_out = header;
      transfer.out = own;
      transfer.descriptor_out = descriptor;
      if (!begins_again) continue;
      Left left = std::exchange(left_[static_cast<std::size_t>(peer)], {});
      transfer.left_out = std::move(left.out);
      transfer.header_in = left.header_in;
      transfer.received = left.received;
      if (left.received >= sizeof(Header)) transfer.in.resize(left.header_in.bytes);
    }
    wait(transfers, deadline);
    return transfers;
  } catch (const Awaited& awaited) {
    if (const std::optional<MeshFailure> failure = failure_of_peers()) throw Error(break_with(*failure));
    int awaiting = awaited.rank;
    for (const MeshLink& link : links_) {
      if (!link || !has_refused(link) || !refusal_.empty()) continue;
      awaiting = link.peer();
      refusal_ = link.refusal()->why;
    }
    leave_collective(transfers, awaiting);
    throw_left();
  } catch (const Error& error) {
    throw Error(break_with({error}));
  } catch (const std::bad_alloc&) {
    throw Error(break_with(
        {Error(Status::kOutOfMemory, "rank " + std::to_string(rank_) + " has no host memory for " + name_of(header))}));
  }
}

void RankMesh::leave_collective(std::vector<Transfer>& transfers, int awaiting) {
  awaiting_ = awaiting;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer < 0) continue;
    Left& left = left_[static_cast<std::size_t>(transfer.peer)];
    left.header_in = transfer.header_in;
    left.received = transfer.received;
    if (transfer.receives() || transfer.header_in.kind == Kind::kBeginAgain) continue;
    left.received = 0;  // a message that was for this collective
  }
  for (Transfer& transfer : transfers) {
    if (transfer.sent == 0) continue;  // also of this rank itself
    Left& left = left_[static_cast<std::size_t>(transfer.peer)];
    while (transfer.sends()) {
      const std::span<const std::byte> rest = transfer.rest();
      left.out.insert(left.out.end(), rest.begin(), rest.end());
      transfer.sent += rest.size();
    }
  }
}

void RankMesh::throw_left() const {
  if (!refusal_.empty()) {
    throw Error(Status::kTimeout, "rank " + std::to_string(awaiting_) + " refused the call: " + refusal_ +
                                      "; recover() makes the group usable again");
  }
  throw Error(Status::kTimeout, "rank " + std::to_string(awaiting_) +
                                    " gave up a call that failed there, and waits in recover() for the other ranks");
}

std::optional<MeshFailure> RankMesh::failure_of_peers() {
  for (MeshLink& link : links_) {
    if (!link) continue;
    if (std::optional<MeshFailure> failure = link.failure()) return failure;
  }
  return std::nullopt;
}

void RankMesh::wait(std::vector<Transfer>& transfers, const Deadline& deadline) {
  std::vector<pollfd> open;
  bool over = false, asked = false;
  for (;;) {
    if (interrupted_) throw Error(Status::kTimeout, "rank " + std::to_string(rank_) + " aborted the group");
    const std::optional<MeshFailure> failure = failure_of_peers();
    open.clear();
    std::vector<int> awaited;
    int refusing = -1;
    for (Transfer& transfer : transfers) {
      if (transfer.peer < 0) continue;
      MeshLink& link = links_[static_cast<std::size_t>(transfer.peer)];
      if (!transfer.closed && transfer.sends()) send(transfer);
      if (!transfer.closed && transfer.receives()) receive(transfer);
      // One that has left has sent all it will, and its part is read above.
      if (!transfer.complete() && transfer.closed && link.left()) {
        throw Error(Status::kDevice, "rank " + std::to_string(transfer.peer) + " left the group before " +
                                         name_of(transfer.header_out) + " was over");
      }
      if (!transfer.complete()) awaited.push_back(transfer.peer);
      // Likewise it has sent all that it will for this call.
      const bool may_leave = transfer.header_out.kind != Kind::kBeginAgain && !transfer.complete();
      if (may_leave && refusing < 0 && has_refused(link)) refusing = transfer.peer;
      const int events = (transfer.sends() ? POLLOUT : 0) | (transfer.receives() ? POLLIN : 0);
      const bool waits = !transfer.closed && events != 0;
      open.push_back({waits ? link.data() : -1, static_cast<short>(events), 0});
      open.push_back({link.control(), POLLIN, 0});
      open.push_back({link.process(), POLLIN, 0});
    }
    if (awaited.empty()) {
      if (failure) break_with(*failure);  // of one that had done its part: the next call's
      return;
    }
    if (failure) throw Error(break_with(*failure));
    if (refusing >= 0) throw Awaited{refusing};
    if (over && awaited.size() > 1 && !asked) {  // one of them may be about to say which one it waits for itself
      asked = true;
      ::poll(open.data(), open.size(), kAskMilliseconds);
      continue;
    }
    if (over) {
      const Header& header = transfers[static_cast<std::size_t>(awaited.front())].header_out;
      throw Error(Status::kTimeout,
                  rank_names(awaited) + " did not take part in " + name_of(header) + " within " + deadline.text());
    }
    if (::poll(open.data(), open.size(), deadline.milliseconds(kAskMilliseconds)) < 0 && errno != EINTR) {
      throw Error(Status::kDevice, std::string("waiting for other ranks: poll: ") + std::strerror(errno));
    }
    over = deadline.passed();  // and then one more look: this process itself may have been stopped
  }
}

void RankMesh::send(Transfer& transfer) {
  const int socket = links_[static_cast<std::size_t>(transfer.peer)].data();
  while (transfer.sends()) {
    const int descriptor = transfer.sent == transfer.left_out.size() ? transfer.descriptor_out : -1;
    const ssize_t size = send_with_descriptor(socket, transfer.rest(), descriptor);
    if (size >= 0) {
      transfer.sent += static_cast<std::size_t>(size);
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (errno == EPIPE || errno == ECONNRESET) {
      receive(transfer);  // what it sent before
      transfer.closed = true;
      return;
    }
    throw Error(Status::kDevice, "rank " + std::to_string(rank_) + " can not send to rank " +
                                     std::to_string(transfer.peer) + ": " + std::strerror(errno));
  }
}

void RankMesh::receive(Transfer& transfer) {
  const int socket = links_[static_cast<std::size_t>(transfer.peer)].data();
  while (transfer.receives()) {
    const std::span header = std::as_writable_bytes(std::span(&transfer.header_in, 1));
    const bool in_header = transfer.received < header.size();
    const std::span<std::byte> rest = in_header ? header.subspan(transfer.received)
                                                : std::span(transfer.in).subspan(transfer.received - header.size());
    bool lost = false;
    const ssize_t size = receive_with_descriptor(socket, rest, transfer.descriptor_in, &lost);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (size <= 0) {
      transfer.closed = true;
      return;
    }
    if (lost) {
      throw Error(Status::kOutOfMemory, "rank " + std::to_string(rank_) + " can not take the descriptor of rank " +
                                            std::to_string(transfer.peer) + ": too many files are open");
    }
    transfer.received += static_cast<std::size_t>(size);
    if (in_header && transfer.received == header.size()) {
      check_header(transfer);
      transfer.in.resize(transfer.header_in.bytes);
    }
    const bool of_left = transfer.header_out.kind == Kind::kBeginAgain && transfer.header_in.kind != Kind::kBeginAgain;
    if (!transfer.receives() && of_left) transfer.received = 0;  // the next one
  }
}

void RankMesh::check_header(const Transfer& transfer) const {
  const Header& theirs = transfer.header_in;
  const Header& own = transfer.header_out;
  if (theirs.kind == Kind::kBeginAgain && own.kind != Kind::kBeginAgain) throw Awaited{transfer.peer};
  if (own.kind != Kind::kBeginAgain && (theirs.kind != own.kind || theirs.sequence != own.sequence)) {
    throw Error(Status::kInvalidArgument, "rank " + std::to_string(rank_) + " is in " + name_of(own) + ", rank " +
                                              std::to_string(transfer.peer) + " in " + name_of(theirs) +
                                              ": all ranks must make the same calls in the same order");
  }
  if (theirs.bytes > kMaxBytes) {
    throw Error(Status::kInternal, "rank " + std::to_string(transfer.peer) + " says that it sends " +
                                       std::to_string(theirs.bytes) + " bytes");
  }
}

}  // namespace uniep
