#include "engine/cuda/memory/signals.h"

#include "engine/cuda/runtime/driver.h"
#include "program/signal_names.h"
#include "uniep/error.h"

namespace uniep {

using cuda::driver;
using cuda::ScopedDevice;

namespace {

std::string place_of(const cuda::WaitReport& report) {
  if (report.stage == cuda::kNoStage) return "at the begin or end of a call";
  const auto direction = static_cast<Direction>(report.direction);
  return std::string("in ") + stage_name(static_cast<Stage>(report.stage), direction) + ", tile (expert " +
         std::to_string(report.expert) + ", m " + std::to_string(report.m) + ", n " + std::to_string(report.n) +
         "), launch " + std::to_string(report.launch);
}

// Whose rows or sums a flag tells of: see pushed_flag() and combined_flag().
std::string owner_text(const cuda::WaitReport& report) {
  const int64_t units = static_cast<FlagSpace>(report.awaited.space) == FlagSpace::kPushed
                            ? report.blocks
                            : int64_t{report.units} * kMaxColumnChunks;
  if (units <= 0 || report.ranks <= 0) return "";
  return " of rank " + std::to_string(report.awaited.index / units % report.ranks);
}

std::string signal_text(const cuda::WaitReport& report) {
  const cuda::AwaitedSignal& awaited = report.awaited;
  const std::string index = std::to_string(awaited.index);
  if (awaited.kind == cuda::SignalKind::kCounter) {
    return std::string("counter ") + counter_name(static_cast<CounterSpace>(awaited.space)) + "[" + index + "]";
  }
  const auto space = static_cast<FlagSpace>(awaited.space);
  if (space == FlagSpace::kArrive) return "rank " + index + " to arrive";
  if (space == FlagSpace::kDone) return "rank " + index + " to be done";
  return std::string("flag ") + flag_name(space) + "[" + index + "]" + owner_text(report);
}

const char* kind_name(cuda::CallKind kind) {
  switch (kind) {
    case cuda::CallKind::kForward:
      return "forward";
    case cuda::CallKind::kBackward:
      return "backward";
    case cuda::CallKind::kDispatch:
      return "dispatch";
    case cuda::CallKind::kCombine:
      return "combine";
    case cuda::CallKind::kRecompute:
      return "FC1 again before backward";
  }
  return "unknown";
}

}  // namespace

std::string number_text(uint32_t number) {
  return number == cuda::kReplayed ? "a replayed call" : "call " + std::to_string(number);
}

std::string call_text(const cuda::CallDescription& call) {
  std::string hash(8, '0');
  for (int digit = 0; digit < 8; ++digit) hash[7 - digit] = "0123456789abcdef"[call.schedule >> (4 * digit) & 15];
  return number_text(call.number) + ", " + kind_name(call.kind) + " of hidden " + std::to_string(call.hidden) +
         ", intermediate " + std::to_string(call.intermediate) + ", " + std::to_string(call.experts) +
         " experts, top-k " + std::to_string(call.topk) + ", schedule, numerics and placement " + hash +
         (call.input == 0 ? ", x copied" : ", x in a symmetric buffer");
}

std::string running_text(int rank, const cuda::RunningNote& note) {
  if (note.group == 0) return "";
  return " (rank " + std::to_string(rank) + "'s GPU began call " + std::to_string(note.call) +
         " of its process's group " + std::to_string(note.group) + " last)";
}

std::string describe(const cuda::WaitReport& report) {
  const std::string rank = "rank " + std::to_string(report.rank);
  const std::string peer = "rank " + std::to_string(report.awaited.index);
  switch (report.awaited.kind) {
    case cuda::SignalKind::kPlacement:
      return rank + ": the call's placement failed";
    case cuda::SignalKind::kPeerFailed:
      return peer + " gave up the call, or left the group; " + rank + " waited " + place_of(report);
    case cuda::SignalKind::kOtherCall:
      return rank + " and " + peer + " do not make the same call";
    default:
      return rank + " waited too long " + place_of(report) + ", for " + signal_text(report) + ": expected " +
             std::to_string(report.awaited.expected) + ", seen " + std::to_string(report.awaited.seen);
  }
}

Signals::Signals(SymmetricMemory& memory, int64_t signal_bytes) : memory_(memory), signal_bytes_(signal_bytes) {
  if (memory.bytes() < signal_bytes) {
    throw Error(Status::kInvalidArgument, "signals need " + std::to_string(signal_bytes) +
                                              " bytes of symmetric memory; the group has " +
                                              std::to_string(memory.bytes()));
  }
  try {
    for (const int rank : memory.own_ranks()) {
      const ScopedDevice scope(memory.device(rank));
      OwnRank& own = own_.emplace_back(OwnRank{rank, nullptr, cuda::SideStream(memory.device(rank))});
      CUdeviceptr address = 0;
      cuda::check(driver().cuMemAlloc(&address, sizeof(cuda::RankState)), "allocating a rank's state");
      own.state = reinterpret_cast<cuda::RankState*>(address);
    }
    clear();
  } catch (...) {
    free_states();
    throw;
  }
}

Signals::~Signals() {
  free_states();
}

void Signals::free_states() noexcept {
  for (const OwnRank& own : own_) {
    if (own.state == nullptr) continue;
    const ScopedDevice scope(memory_.device(own.rank), std::nothrow);
    driver().cuMemFree(reinterpret_cast<CUdeviceptr>(own.state));
  }
}

const Signals::OwnRank& Signals::of(int own_rank) const {
  for (const OwnRank& own : own_) {
    if (own.rank == own_rank) return own;
  }
  throw Error(Status::kInvalidArgument, "rank " + std::to_string(own_rank) + " is not driven by this process");
}

void Signals::clear() {
  for (OwnRank& own : own_) {
    own.stream.clear(memory_.address(own.rank, own.rank), static_cast<size_t>(signal_bytes_));
    cuda::RankState state{};
    for (int peer = 0; peer < memory_.ranks(); ++peer) {
      state.board[peer] = static_cast<cuda::CallBoard*>(memory_.address(own.rank, peer));
    }
    own.stream.write(own.state, &state, sizeof(state));
  }
}

void Signals::check() {
  for (OwnRank& own : own_) {
    {
      const ScopedDevice scope(memory_.device(own.rank));
      cuda::check(driver().cuCtxSynchronize(), "waiting for a rank");
    }
    cuda::WaitReport report{};
    own.stream.read(&report, &own.state->report, sizeof(report));
    if (report.failed == 0) continue;
    throw Error(Status::kTimeout, describe(report) + "; recover() makes the group usable again");
  }
}

}  // namespace uniep
