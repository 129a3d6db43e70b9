#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/symmetric_memory.h"
#include "engine/cuda/device/arguments/signals.h"
#include "engine/cuda/runtime/side_stream.h"

namespace uniep {

// The signals at the start of a group's symmetric memory (where layers run: a CallBoard first), and each own rank's
// state: its epoch (in device memory, so that captured graphs replay) and its report of waits that ran out.
class Signals {
 public:
  // Clears `signal_bytes` of each own rank's memory. No peer may write there before a barrier behind it.
  Signals(SymmetricMemory& memory, int64_t signal_bytes);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  cuda::RankState* state(int own_rank) const { return of(own_rank).state; }
  uint32_t* epoch(int own_rank) const { return &state(own_rank)->epoch; }
  cuda::WaitReport* report(int own_rank) const { return &state(own_rank)->report; }

  // Throws uniep::Error (kTimeout) that names rank, stage, tile, counter or flag, what was expected and what was
  // seen if a wait of an own rank ran out. Waits for the device.
  void check();

  // The signals and states are as new. Nothing may run that uses them.
  void clear();

 private:
  struct OwnRank {
    int rank;
    cuda::RankState* state;
    cuda::SideStream stream;
  };
  const OwnRank& of(int own_rank) const;
  void free_states() noexcept;

  SymmetricMemory& memory_;
  int64_t signal_bytes_;
  std::vector<OwnRank> own_;
};

// What a report of a wait that ran out says, in words.
std::string describe(const cuda::WaitReport& report);

// What a peer's GPU runs, to be said behind what is missing of it; empty where nothing is known.
std::string running_text(int rank, const cuda::RunningNote& note);

// A call, in words.
std::string number_text(uint32_t number);
std::string call_text(const cuda::CallDescription& call);

}  // namespace uniep
