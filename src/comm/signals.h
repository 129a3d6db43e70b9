#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/symmetric_memory.h"
#include "engine/cuda/device/signals.h"

namespace uniep {

// The flags at the start of a group's symmetric memory, each own rank's epoch (in device memory, so that captured
// graphs replay) and its report of waits that ran out.
class Signals {
 public:
  Signals(SymmetricMemory& memory, int64_t flag_bytes);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  uint32_t* epoch(int own_rank) const { return state(own_rank).epoch; }
  cuda::WaitReport* report(int own_rank) const { return state(own_rank).report; }

  // Throws uniep::Error (kTimeout) that names rank, stage, tile, counter or flag, what was expected and what was
  // seen if a wait of an own rank ran out. Waits for the device.
  void check();

  // After a time-out: agrees with all ranks on a new generation, in which all flags and epochs start again. Every rank
  // must call it.
  void recover();

 private:
  struct RankState {
    int rank = 0;
    uint32_t* epoch = nullptr;
    cuda::WaitReport* report = nullptr;
  };
  const RankState& state(int own_rank) const;
  void clear();

  SymmetricMemory& memory_;
  int64_t flag_bytes_;
  std::vector<RankState> states_;
};

// What a report of a wait that ran out says, in words.
std::string describe(const cuda::WaitReport& report);

}  // namespace uniep
