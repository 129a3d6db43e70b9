#include "comm/signals.h"

#include "engine/cuda/driver.h"
#include "program/signal_names.h"
#include "uniep/error.h"

namespace uniep {

using cuda::driver;
using cuda::ScopedDevice;

namespace {

struct RankMemory {
  cuda::WaitReport report;
  uint32_t epoch;
};

std::string place_of(const cuda::WaitReport& report) {
  if (report.stage == cuda::kNoStage) return "at the end of the call";
  const auto direction = static_cast<Direction>(report.direction);
  return std::string("in ") + stage_name(static_cast<Stage>(report.stage), direction) + ", tile (expert " +
         std::to_string(report.expert) + ", m " + std::to_string(report.m) + ", n " + std::to_string(report.n) +
         "), launch " + std::to_string(report.launch);
}

std::string signal_text(const cuda::AwaitedSignal& awaited) {
  const std::string index = std::to_string(awaited.index);
  if (awaited.kind == cuda::SignalKind::kCounter) {
    return std::string("counter ") + counter_name(static_cast<CounterSpace>(awaited.space)) + "[" + index + "]";
  }
  const auto space = static_cast<FlagSpace>(awaited.space);
  if (space == FlagSpace::kArrive) return "rank " + index + " to arrive";
  if (space == FlagSpace::kDone) return "rank " + index + " to be done";
  return std::string("flag ") + flag_name(space) + "[" + index + "]";
}

CUdeviceptr pointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

}  // namespace

std::string describe(const cuda::WaitReport& report) {
  return "rank " + std::to_string(report.rank) + " waited too long " + place_of(report) + ", for " +
         signal_text(report.awaited) + ": expected " + std::to_string(report.awaited.expected) + ", seen " +
         std::to_string(report.awaited.seen);
}

Signals::Signals(SymmetricMemory& memory, int64_t flag_bytes) : memory_(memory), flag_bytes_(flag_bytes) {
  if (memory.bytes() < flag_bytes) {
    throw Error(Status::kInvalidArgument, "signals need " + std::to_string(flag_bytes) +
                                              " bytes of symmetric memory; the group has " +
                                              std::to_string(memory.bytes()));
  }
  for (const int rank : memory.own_ranks()) {
    const ScopedDevice scope(memory.device(rank));
    CUdeviceptr address = 0;
    cuda::check(driver().cuMemAlloc(&address, sizeof(RankMemory)), "allocating a rank's epoch");
    auto* const own = reinterpret_cast<RankMemory*>(address);
    states_.push_back({rank, &own->epoch, &own->report});
  }
  clear();
  memory_.barrier();
}

Signals::~Signals() {
  for (const RankState& own : states_) {
    const ScopedDevice scope(memory_.device(own.rank));
    driver().cuMemFree(pointer(own.report));
  }
}

const Signals::RankState& Signals::state(int own_rank) const {
  for (const RankState& own : states_) {
    if (own.rank == own_rank) return own;
  }
  throw Error(Status::kInvalidArgument, "rank " + std::to_string(own_rank) + " is not driven by this process");
}

void Signals::clear() {
  for (const RankState& own : states_) {
    const ScopedDevice scope(memory_.device(own.rank));
    cuda::check(driver().cuMemsetD8Async(pointer(own.report), 0, sizeof(RankMemory), nullptr), "clearing an epoch");
    cuda::check(driver().cuMemsetD8Async(pointer(memory_.address(own.rank, own.rank)), 0,
                                         static_cast<size_t>(flag_bytes_), nullptr),
                "clearing signals");
    cuda::check(driver().cuCtxSynchronize(), "clearing signals");
  }
}

void Signals::check() {
  for (const RankState& own : states_) {
    const ScopedDevice scope(memory_.device(own.rank));
    cuda::WaitReport report{};
    cuda::check(driver().cuMemcpyDtoHAsync(&report, pointer(own.report), sizeof(report), nullptr), "reading a report");
    cuda::check(driver().cuCtxSynchronize(), "reading a report");
    if (report.failed == 0) continue;
    throw Error(Status::kTimeout, describe(report) + "; recover() makes the group usable again");
  }
}

void Signals::recover() {
  // Nobody's kernel still runs after the first barrier; nobody signals before the second.
  memory_.barrier();
  clear();
  memory_.barrier();
}

}  // namespace uniep
