#include "comm/signals.h"

#include "engine/cuda/driver.h"
#include "uniep/error.h"

namespace uniep {

using cuda::driver;
using cuda::ScopedDevice;

namespace {

struct RankMemory {
  cuda::WaitReport report;
  uint32_t epoch;
};

CUdeviceptr pointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

}  // namespace

Signals::Signals(SymmetricMemory& memory) : memory_(memory) {
  if (memory.bytes() < static_cast<int64_t>(sizeof(cuda::SignalBlock)) || memory.ranks() > cuda::kMaxRanks) {
    throw Error(Status::kInvalidArgument, "signals need " + std::to_string(sizeof(cuda::SignalBlock)) +
                                              " bytes of symmetric memory and at most " +
                                              std::to_string(cuda::kMaxRanks) + " ranks");
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
    cuda::check(
        driver().cuMemsetD8Async(pointer(memory_.address(own.rank, own.rank)), 0, sizeof(cuda::SignalBlock), nullptr),
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
    const bool arrival = report.kind == static_cast<uint32_t>(cuda::SignalKind::kArrive);
    throw Error(Status::kTimeout, "rank " + std::to_string(report.rank) + " waited too long for rank " +
                                      std::to_string(report.peer) + " to " + (arrival ? "arrive" : "be done") +
                                      ": epoch " + std::to_string(report.expected) + " expected, " +
                                      std::to_string(report.seen) + " seen; recover() makes the group usable again");
  }
}

void Signals::recover() {
  // Nobody's kernel still runs after the first barrier; nobody signals before the second.
  memory_.barrier();
  clear();
  ++generation_;
  memory_.barrier();
}

}  // namespace uniep
