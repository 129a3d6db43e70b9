#pragma once

#include "sim/operand_wait.h"
#include "sim/simulate.h"
#include "tune/load.h"
#include "uniep/layer.h"

// The time of one direction of a layer by closed form: what a solver can evaluate a million times a second. It is a sum
// of maxima over a few numbers of three groups of fields, each of which is worked out once for many Schedules: those of
// the GEMMs, of the dispatch, and of the combine. Times are in us, work of tensor cores in cycles. The first GEMM is
// FC1 or dgrad FC2, the second one FC2 or dgrad FC1.
namespace uniep::tune {

using sim::State;

struct ModelledCall {
  LayerConfig layer;
  int ranks = 1;
  Direction direction = Direction::kForward;
  State state = State::kSustained;
};

// us in which the memory carries what no cache saves.
struct MemoryTimes {
  double first = 0, second = 0, gradients = 0;  // backward, by its parts
  double all = 0;
};

// What does not depend on the Schedule.
struct Problem {
  LayerShape shape;
  Direction direction = Direction::kForward;
  int halves = 2;               // of z: gate and up, or 1
  bool fp32_gradients = false;  // of weights
  bool adds_gradients = false;  // to what is there
  bool groups = false;          // combine_groups: rows are summed before they are sent
  int ranks = 1;
  double begin = 0;  // us from the call to the first copy
  RankLoad load;     // of the busiest rank
  const sim::MachineDescription* machine = nullptr;
  State state = State::kSustained;
  double workers = 1;
  MemoryTimes memory;
};
Problem make_problem(const ModelledCall& call, const RankLoad& load, const sim::MachineDescription& machine);

// By fusion, order.*, queue, tile.*, backward.wgrad, save.z.
struct GemmPart {
  bool fused = true;       // not one launch a stage
  bool one_launch = true;  // fusion=layer
  bool mixed = false;
  double waves = 1;                        // as they count for both GEMMs
  double first_tile = 0, second_tile = 0;  // cycles of a tile of each GEMM that waits for nothing
  sim::OperandWait first_wait, second_wait;
  double first_tiles = 0;  // of the first GEMM
  double columns = 256;    // of a tile of the second GEMM
  double wide_cycles = 0;  // of the first GEMM's tiles if they had 256 columns and nothing slowed them
  double slowdown = 1;     // what slows both GEMMs down
  // Backward's weight gradients.
  bool fills = false;                      // in the launch of the second GEMM
  double gradient_cycles = 0;              // of all tiles
  double again_tiles = 0, again_tile = 0;  // FC1's, with save.z=recompute: how many, and cycles of one
  sim::OperandWait again_wait;
};

// By dispatch.*, comm.where, comm.dispatch_sms, comm.chunk_bytes, save.*.
struct DispatchPart {
  bool by_warps = true;
  double operands = 1;  // 2: x again, beside dy
  double workers = 0;   // that do nothing else meanwhile; by warps 0
  double copy = 0;      // us of work, of one worker and operand
  double first = 0;     // us until the first rows are there
  double taken = 0;     // us that an operand's copies take from tiles, of all workers together
  double link = 0;      // us in which links carry an operand alone
  double early = 1;     // how much more rows are taken at the begin than in the mean
  // x again beside FC1, before the rest, by warps: as `copy`, `first` and `taken`; 0 where it is not.
  double again = 0, again_first = 0, again_taken = 0;
};

// By combine.*, comm.combine_sms, comm.reduce_sms.
struct CombinePart {
  bool staged = false, by_warps = true;
  bool groups = false;       // a token's rows are summed before they are sent
  bool own_summers = false;  // workers that only sum, and no others do
  double senders = 0;        // workers that only send
  int chunks = 1;
  double workers = 0;     // that compute nothing
  double tiles = 0;       // column tiles of the second GEMM
  double link = 0;        // us in which links carry it alone
  double link_both = 0;   // and while they carry the dispatch too, those of the dispatch not counted
  double send = 0;        // us of work of one worker
  double send_task = 0;   // us of the longest task of that, by warps
  double sum = 0;         // KB
  double sum_beside = 0;  // KB/us, while there are tiles
};

struct Estimate {
  double us = 0;
  double clock = 0;         // GHz
  const char* limits = "";  // what bounds the middle of the call
};

GemmPart gemm_part(const Problem& problem, const Schedule& schedule);
DispatchPart dispatch_part(const Problem& problem, const Schedule& schedule);
CombinePart combine_part(const Problem& problem, const Schedule& schedule);

// A Schedule in parts; `reserved` is its comm.reserve_sms, less those that it lends, which neither send nor sum.
struct Parts {
  const GemmPart* gemm = nullptr;
  const DispatchPart* dispatch = nullptr;
  const CombinePart* combine = nullptr;
  double reserved = 0, lent = 0;
};

// `rounds` of the clock, which follows the load: 2 are within a tenth of a percent.
Estimate estimate(const Problem& problem, const Parts& parts, int rounds = 3);
Estimate estimate(const Problem& problem, const Schedule& schedule);

// What no Schedule can beat on this machine, each by itself, in us.
struct Bound {
  double gemms = 0;  // multiplications alone, all workers busy
  double links = 0;  // the busier way
  double memory = 0;
  double path = 0;  // begin, first row, a tile of each GEMM, its sum, end
  double us() const;
  const char* limits() const;  // "gemm", "links", "memory", "begin and end"
};
Bound lower_bound(const Problem& problem);

}  // namespace uniep::tune
