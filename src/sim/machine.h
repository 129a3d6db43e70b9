#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "uniep/schedule.h"

// What a machine can do, as the simulator and the solver see it: a JSON file with a version (docs/simulator.md), in
// which every number has its unit and says where it is from. A rank is one GPU, or one die.
namespace uniep::sim {

inline constexpr int kMachineVersion = 3;

// Where a number is from.
enum class Source : int { kMeasured = 0, kPublished, kAssumed };

// What a class of workers may run. Dispatch stands for pulls, pushes and what the owner does about pushed rows;
// combine for sends of a staged combine. The activation is a stage of its own only where a class names it; else it is
// in the first GEMM's epilogue.
enum class Work : int {
  kDispatch = 0,
  kFc1,
  kFc2,
  kDgradFc2,
  kDgradFc1,
  kWgradFc2,
  kWgradFc1,
  kActivation,
  kCombine,
  kReduce,
};
inline constexpr int kWorkCount = 10;
const char* work_name(Work work);
Work work_of(GemmStage stage);

struct WorkSet {
  uint32_t bits = 0;
  bool has(Work work) const { return (bits >> static_cast<int>(work) & 1) != 0; }
  void add(Work work) { bits |= uint32_t{1} << static_cast<int>(work); }
  bool operator==(const WorkSet&) const = default;
};

// Workers of a rank that are alike, with queues of their own.
struct WorkerClass {
  std::string name;  // "sm", "cube", "vector"
  double count = 0;
  WorkSet work;
  bool operator==(const WorkerClass&) const = default;
};

// An output tile takes cycles_per_k K + cycles cycles of one worker.
struct TileCost {
  WorkSet work;  // GEMM stages
  int rows = 128, columns = 256;
  double cycles_per_k = 0;
  double cycles = 0;
  bool operator==(const TileCost&) const = default;
};

// Bytes that go in, and bytes that go out, of one rank a second while so many ranks of the level do the same: rows read
// from peers, rows written to peers, and both at once.
struct LinkRate {
  int ranks = 2;
  double read = 0, write = 0, both = 0;  // GB/s
  bool operator==(const LinkRate&) const = default;
};

// Links between ranks of one group of `ranks` ranks that follow each other: first those of a node, then those between
// nodes, whose rates are those of one rank's share. With a relay a row crosses to another node once, and is handed on
// inside it.
struct LinkLevel {
  std::string name;  // "nvlink", "network"
  int ranks = 1;     // that it reaches
  bool relay = false;
  double latency = 0;           // us
  std::vector<LinkRate> rates;  // by ranks, ascending
  bool operator==(const LinkLevel&) const = default;
};

struct Clock {
  double limit = 0;           // GHz at the power limit under full load
  double limit_exponent = 0;  // under a load l it is limit l^-limit_exponent
  double pause = 0;           // GHz after a pause
  double pause_drop = 0;      // GHz/ms that it loses in a call
  double pause_lowest = 0;    // GHz
  double highest = 0;         // GHz
  double rest = 0;            // us between two calls at the power limit, in which power is saved
  double waiting = 1;         // share of a load that a tile is while no tensor core works on it
  double linked = 0;          // share that it loses at the power limit where rows go between ranks
  bool operator==(const Clock&) const = default;
};

// Copies by one warp of a worker, beside its tiles.
struct WarpCopies {
  double task = 0;          // us a dispatch task
  double chunk_in = 0;      // us a chunk of 4096 bytes taken in
  double chunk_out = 0;     // us a chunk of 4096 bytes put somewhere
  double chunk_remote = 0;  // us more a chunk of 4096 bytes that is pulled from another rank
  double chunk_fixed = 0;   // share of a chunk's time that does not follow its size
  double alone = 0;         // share of that time that it takes while no tiles run
  double push = 0;          // us more a task under push
  double send = 0;          // us a piece of 2048 bytes that a staged combine sends
  double send_fixed = 1;    // share of that which does not follow its size
  double ring = 0;          // of the time of a chunk of 4096 bytes, with a ring of three stages, what is latency
  double clocked =
      0;  // share of the time of copies that follows the clock; at Clock::limit, or ::pause, they are as here
  bool operator==(const WarpCopies&) const = default;
};

// Copies by all warps of a worker that does nothing else, through its one port.
struct PortCopies {
  double warps = 0;     // that copy
  double in = 0;        // ps/byte
  double out = 0;       // ps/byte
  double overhead = 0;  // share that is lost
  bool operator==(const PortCopies&) const = default;
};

// What keeps a tile waiting for its operands: a stage of its pipeline is asked for once its last reader is through.
struct Pipeline {
  double latency = 0;  // us until what is asked for begins to come, while few workers ask
  double busy = 0;     // us more while all do
  double port = 0;     // bytes into one worker a cycle of Clock::highest; 0: no limit
  bool operator==(const Pipeline&) const = default;
};

struct Memory {
  double bandwidth = 0;  // GB/s read and written
  double capacity = 0;   // GB
  double l2 = 0;         // MB
  double shared = 0;     // bytes of a worker
  bool operator==(const Memory&) const = default;
};

// GB/s read and written by all workers of a rank.
struct Sums {
  double beside = 0;  // by copying warps, beside tiles
  double alone = 0;   // by all warps, once there are no more tiles
  bool operator==(const Sums&) const = default;
};

// Shares by which things take longer beside others; a negative one is a gain.
struct Slowdowns {
  double copies = 0;            // tiles beside copies: taken_from_tiles() of warp_pieces.h
  double sums = 0;              // tiles beside summing warps
  double mixed_list = 0;        // tiles of both GEMMs by turns, at the power limit
  double mixed_list_pause = 0;  // the same after a pause
  double mixed_queues = 0;      // tiles where each GEMM has a queue
  double raster_8 = 0;          // tiles in bands of up to 8 row blocks
  double raster_4 = 0;          // up to 4
  double cluster_1 = 0;         // tiles of workers that share none
  double static_queue = 0;      // tiles under static queues
  double fused = 0;             // tiles in a launch with copies or sums
  bool operator==(const Slowdowns&) const = default;
};

struct Times {
  double begin = 0;         // us from the call to the first copy
  double peers = 0;         // us more of that with several ranks
  double launch = 0;        // us between two launches of a call
  double end = 0;           // us from the last sum to the end of the call on all ranks
  double flag = 0;          // us until who waits for a counter or flag goes on
  double late_blocks = 0;   // K blocks of the next tile in which a tile's results are stored
  double task_static = 0;   // us to find the next tile under static queues
  double task_dynamic = 0;  // us under dynamic ones
  bool operator==(const Times&) const = default;
};

struct WeightGradients {
  double fp32 = 0;  // cycles more a tile whose sums are stored in fp32, added or not
  bool operator==(const WeightGradients&) const = default;
};

struct NumberOrigin {
  Source source = Source::kAssumed;
  std::string from;  // in words
  bool operator==(const NumberOrigin&) const = default;
};

// What `uniep calibrate` says about a file that it wrote.
struct CalibratedGpu {
  std::string device;                 // the GPU's name
  std::vector<std::string> doubtful;  // what the measurement disagrees with itself on; auto wants none
  bool operator==(const CalibratedGpu&) const = default;
};

struct MachineDescription {
  std::string name, title;
  std::optional<CalibratedGpu> calibrated;
  std::vector<WorkerClass> workers;
  std::vector<TileCost> tiles;
  std::vector<LinkLevel> links;  // those that reach fewer ranks first
  Clock clock;
  WarpCopies copy;
  PortCopies port;
  Pipeline pipeline;
  Memory memory;
  Sums sums;
  Slowdowns slowdown;
  Times time;
  WeightGradients weight_gradient;
  std::map<std::string, NumberOrigin> origin;  // by the number's key: "clock.limit", "links[0].rates[1].read"

  bool operator==(const MachineDescription&) const = default;

  // The first class that runs a stage; there is one, but for the activation.
  const WorkerClass& class_of(Work work) const;
  bool has_activation_stage() const;
  double begin_us(int ranks) const { return time.begin + (ranks > 1 ? time.peers : 0); }
  int most_ranks() const { return links.empty() ? 1 : links.back().ranks; }
  // The level over which two ranks reach each other; most_ranks() or fewer.
  int level_between(int rank, int other) const;
  // Cycles of an output tile with products along k: those of the nearest size that is given, in proportion.
  double tile_cycles(Work work, int rows, int columns, int64_t k) const;
  // What a level carries while so many ranks use it; between two given numbers of ranks in proportion to their
  // logarithm, beyond them the nearest.
  LinkRate link_rate(int level, int ranks) const;
};

// Reads a description; `file` stands in messages. Throws Error(kInvalidArgument), one line that names the file, the
// key, its value and what is legal. Takes at most kMaxMachineText bytes.
inline constexpr std::size_t kMaxMachineText = std::size_t{1} << 20;
MachineDescription parse_machine(std::string_view text, const std::string& file);

// The whole description as such a file.
std::string machine_json(const MachineDescription& machine);

// Descriptions that are in the library, by name; kDefaultMachine among them.
inline constexpr const char* kDefaultMachine = "h200";
std::vector<std::string> shipped_machine_names();
// Throws Error(kInvalidArgument) for a name that is none of them.
const MachineDescription& shipped_machine(std::string_view name);
// That of a GPU of this name ("NVIDIA H200, ..."); null where none was fitted to measurements.
const MachineDescription* machine_of_device(std::string_view device);
// Whether GPUs of this name and so many compute units are of the kind that the description was fitted to: the same, and
// not a slower one of nearly the same name ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", a part of a GPU).
bool describes_kind(const MachineDescription& machine, std::string_view device, int compute_units);

// What a Schedule for so many ranks of the machine is filled for and validated against.
Machine schedule_machine(const MachineDescription& machine, int ranks);

}  // namespace uniep::sim
