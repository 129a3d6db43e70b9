#pragma once

#include "model/portability.h"

// Arguments of litmus_kernels.cu, for host and device.
namespace uniep::cuda::test {

// How a warp's words get to another warp, as the layer's kernels do it.
enum class Idiom : int32_t {
  kBulkStore = 0,  // bulk stores into the other's memory, a flag, bulk loads there
  kStore,          // ordinary stores there, a flag, bulk loads
  kStoreLoad,      // ordinary stores there, a flag, ordinary loads
  kPull,           // ordinary stores at home, a flag, bulk loads from afar
  kRing,           // bulk loads into two stages in turn, bulk stores out of them, a flag, bulk loads
  kCluster,        // records through the task ring of a cluster
};

constexpr int32_t kLitmusBytes = 2048;  // of a pair of warps and round
constexpr int32_t kLitmusChunks = 4;    // kRing: that many moves of as many bytes

// In the memory of each of the two ranks, for each pair.
struct alignas(128) LitmusPair {
  uint8_t data[kLitmusChunks * kLitmusBytes];
  uint8_t source[kLitmusChunks * kLitmusBytes];  // kRing: what the producer loads
  uint32_t flag, ack;                            // the last round that is there, or has been read
};

struct LitmusArguments {
  LitmusPair* memory[2][2];    // [rank][peer]: how `rank` reaches `peer`
  uint32_t* load[2][2];        // words that others move meanwhile, likewise
  unsigned long long* wrong;   // words, of this launch's consumers
  uint32_t* finished;          // pairs, on this GPU
  uint32_t* stopped;           // one that waited for too long has ended all
  uint64_t limit_nanoseconds;  // of a wait
  int64_t load_words;
  Idiom idiom;
  int32_t weak;  // 0: as the kernels do it. 1: without what keeps the data's order; 2: without what keeps the flag's
  int32_t pairs;
  int32_t producer;    // rank
  int32_t first_rank;  // block b works for rank first_rank + b / pairs, for this many:
  int32_t ranks;
  uint32_t first_round, rounds;
};

}  // namespace uniep::cuda::test
