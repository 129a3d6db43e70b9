#include "engine/cuda/memory/tile_records.h"

#include <algorithm>

#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {
namespace {

constexpr int kAgents = 2;  // copy, compute

// The expert that a timeline names: global, or -1 for tiles of no expert.
int global_expert(const uniep::Task& task, int first_expert) {
  switch (task.stage) {
    case Stage::kPush:
      return task.expert;
    case Stage::kGroupSend:
    case Stage::kReduce:
      return -1;
    default:
      return first_expert + task.expert;
  }
}

}  // namespace

std::size_t TileRecords::counts_bytes() const {
  return static_cast<std::size_t>(round_up(static_cast<int64_t>(workers_) * kAgents * sizeof(uint32_t), 256));
}

void TileRecords::reserve(int device, int workers) {
  if (workers <= workers_ && device == device_ && memory_.data() != nullptr) return;
  device_ = device;
  workers_ = workers;
  memory_ = DeviceBlock();
  memory_ = DeviceBlock(device, counts_bytes() + sizeof(TileRecord) * kCapacity * kAgents * workers, "tile records");
}

void TileRecords::clear(void* stream) const {
  const ScopedDevice scope(device_);
  check(driver().cuMemsetD8Async(device_pointer(memory_.data()), 0, counts_bytes(), static_cast<CUstream>(stream)),
        "clearing tile records");
}

void TileRecords::append_to(std::vector<TileEvent>& events, int rank, int first_expert, Direction direction) const {
  const ScopedDevice scope(device_);
  const std::size_t agents = static_cast<std::size_t>(workers_) * kAgents;
  std::vector<uint32_t> counts(agents);
  std::vector<TileRecord> records(agents * kCapacity);
  check(driver().cuMemcpyDtoHAsync(counts.data(), device_pointer(this->counts()), counts.size() * sizeof(uint32_t),
                                   nullptr),
        "reading tile records");
  check(driver().cuMemcpyDtoHAsync(records.data(), device_pointer(this->records()), records.size() * sizeof(TileRecord),
                                   nullptr),
        "reading tile records");
  check(driver().cuCtxSynchronize(), "reading tile records");
  for (std::size_t agent = 0; agent < agents; ++agent) {
    const uint32_t kept = std::min(counts[agent], kCapacity);
    for (uint32_t i = 0; i < kept; ++i) {
      const TileRecord& record = records[agent * kCapacity + i];
      TileEvent event;
      event.rank = rank;
      event.worker = static_cast<int>(agent / kAgents);
      event.copy_agent = agent % kAgents == 0;
      event.stage = stage_name(record.task.stage, direction);
      event.expert = global_expert(record.task, first_expert);
      event.m = record.task.m;
      event.n = record.task.n;
      event.wait_begin_ns = static_cast<int64_t>(record.wait_begin_ns);
      event.begin_ns = static_cast<int64_t>(record.begin_ns);
      event.end_ns = static_cast<int64_t>(record.end_ns);
      events.push_back(event);
    }
  }
}

}  // namespace uniep::cuda
