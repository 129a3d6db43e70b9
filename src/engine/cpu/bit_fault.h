#pragma once

#include <atomic>
#include <cstdint>

#include "program/namespace.h"

namespace uniep::program {
struct RankProgram;
struct Task;
}  // namespace uniep::program

namespace uniep::cpu {

struct Call;

// Where a wrong chip flips a bit: behind one of its tiles, before the tile's signals.
enum class BitSite {
  kFirstGemm,      // z, or dz, of a tile
  kOutput,         // y, or dx, as it is stored
  kSum,            // the fp32 sum of one element of y or dx, before it is rounded
  kDispatchedRow,  // a row of x, or of dy, as it arrives
  kReturnedRow,    // a row on its way back, as it arrives
  kGradient,       // dW1 or dW2, as it is stored
  kWorker,         // the first of these that the tile has, by one worker alone
};

// A wrong chip that tests plant, to see that it is found. It outlives the calls that it is in.
struct BitFault {
  BitSite site = BitSite::kOutput;
  int rank = 0;    // -1: all, as a wrong kernel
  int worker = 0;  // of kWorker
  int raster = 0;  // not 0: only under a Schedule with this order.raster
  bool steady =
      false;          // instead: wherever the site is, the first element of an expert or of a rank, always the same bit
  uint64_t seed = 1;  // which row, column and bit
  int64_t after = 0;  // tiles of the site that are right before the only wrong one
  int64_t one_in = 0;   // not 0: instead, one of so many tiles is wrong, for ever
  int64_t most = 1000;  // wrong ones with one_in
  std::atomic<int64_t> tiles{0}, flipped{0};
};

void flip_bit(Call& call, BitFault& fault, const RankProgram& program, int worker, const Task& task);

}  // namespace uniep::cpu
