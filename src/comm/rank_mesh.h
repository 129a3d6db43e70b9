#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/deadline.h"
#include "comm/mesh_link.h"
#include "io/descriptor.h"
#include "uniep/error.h"

namespace uniep {

// What the ranks of a group agree on before they meet.
struct MeshBootstrap {
  int rank = 0;
  int ranks = 1;
  std::string name;          // any bytes, equal on all ranks and no other group's
  std::string kernels = {};  // by their sources: ranks of another build are refused
};

// Why a rank can not take part in what all are to do; kOk: it can.
struct Problem {
  Status status = Status::kOk;
  std::string text;
};

// What `action` throws.
template <typename Action>
Problem problem_in(Action&& action) {
  try {
    action();
    return {};
  } catch (const Error& error) {
    return {error.status(), error.what()};
  } catch (const std::bad_alloc&) {
    return {Status::kOutOfMemory, "no host memory"};
  } catch (const std::exception& error) {
    return {Status::kInternal, error.what()};
  }
}

// Sockets between all processes of a group, which are processes of one host and one user: every wait of hosts for each
// other goes through here and ends. All functions but fail() and peer_failure() are collective: every rank calls the
// same ones in the same order. They throw Error that names the rank at fault: kTimeout if it did not come in time,
// kDevice if it failed, left or died (noticed at once), kInvalidArgument if it called another one. The mesh is broken
// then, all ranks hear of it, and every later call throws the same; but for begin_again(). Not thread-safe, but for
// interrupt(). A fork()ed child must not use it.
class RankMesh {
 public:
  static constexpr int kMaxRanks = 64;

  // Returns when all ranks have come, throws Error(kTimeout) that names those that have not. `wait_seconds` is the
  // limit of calls below that are given none (0).
  RankMesh(const MeshBootstrap& bootstrap, double join_seconds, double wait_seconds);
  ~RankMesh();
  RankMesh(const RankMesh&) = delete;
  RankMesh& operator=(const RankMesh&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  double wait_seconds() const { return wait_seconds_; }

  // What each rank gives, in rank order. Sizes may differ.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> own, double seconds = 0);

  void barrier(double seconds = 0);

  // A duplicate of each rank's descriptor; none where that rank gave -1, and none for this rank.
  std::vector<Descriptor> all_gather_descriptors(int own, double seconds = 0);

  // Returns if no rank has a problem. Else all ranks throw the same Error, that of the lowest rank with a problem,
  // which it names; the mesh is not broken by that.
  void agree(const Problem& own, double seconds = 0);

  // Begins anew behind a failure that not all ranks have seen: a rank that is in another collective, or comes to one,
  // leaves it with Error(kTimeout), and so it is with every later one until it begins anew, too.
  void begin_again(double seconds = 0);
  // Which rank waits in begin_again() for this one, or refused the call that this one has left; -1: none.
  int awaiting_rank() const { return awaiting_; }

  // Collectives belong to a call of the group's while this lives.
  class OfCall {
   public:
    OfCall(RankMesh* mesh, uint32_t call) : mesh_(mesh) {
      if (mesh_ != nullptr) mesh_->call_ = call;
    }
    ~OfCall() {
      if (mesh_ != nullptr) mesh_->call_.reset();
    }
    OfCall(const OfCall&) = delete;
    OfCall& operator=(const OfCall&) = delete;

   private:
    RankMesh* mesh_;
  };
  // Tells all ranks that this one takes no part in a call: where they wait for it in a collective of that call they
  // leave it with Error(kTimeout), as in begin_again(). Of no consequence to those that do not. Does not wait.
  void refuse(uint32_t call, const std::string& why) noexcept;

  // Tells all ranks that this one can not go on: what they wait for ends with "rank R failed: why". Does not wait.
  void fail(const std::string& why) noexcept;

  // From any thread: a wait that this rank is in, or begins, ends soon, and the mesh is broken by that.
  void interrupt() noexcept { interrupted_ = true; }

  // Why the mesh is broken, or a peer has failed or died; empty if it is not known to be. Does not wait.
  std::string peer_failure();
  // Which peer has ended its part in the mesh in order; -1: none. Does not wait.
  int peer_that_left();

 private:
  enum class Kind : uint32_t { kAllGather = 1, kBarrier, kDescriptors, kAgree, kBeginAgain };
  struct Header {
    Kind kind;
    uint32_t reserved;
    uint64_t sequence;
    uint64_t bytes;
  };
  struct Transfer;
  struct Left;
  static std::string name_of(const Header& header);

  std::vector<Transfer> run_collective(Kind kind, std::span<const std::byte> own, int descriptor,
                                       const Deadline& deadline);
  void wait(std::vector<Transfer>& transfers, const Deadline& deadline);
  std::optional<MeshFailure> failure_of_peers();
  void send(Transfer& transfer);
  void receive(Transfer& transfer);
  void check_header(const Transfer& transfer) const;
  Deadline deadline_of(double seconds) const { return Deadline(seconds > 0 ? seconds : wait_seconds_); }
  bool has_refused(const MeshLink& link) const;
  void leave_collective(std::vector<Transfer>& transfers, int awaiting);
  [[noreturn]] void throw_left() const;
  const Error& break_with(const MeshFailure& failure) noexcept;

  const int rank_;
  const int ranks_;
  const double wait_seconds_;
  const int owner_;  // the process that may use it
  uint64_t sequence_ = 0;
  std::vector<MeshLink> links_;  // by rank; none to this one
  std::vector<Left> left_;       // by rank: of a collective that was left
  int awaiting_ = -1;
  std::string refusal_;           // why that one did not take part, if it is known
  std::optional<uint32_t> call_;  // of the collectives
  std::optional<MeshFailure> broken_;
  std::atomic<bool> interrupted_{false};
};

}  // namespace uniep
