#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "uniep/direction.h"
#include "uniep/export.h"
#include "uniep/numerics.h"
#include "uniep/shape.h"

namespace uniep {

enum class EngineKind : int { kAuto = 0, kCpu = 1, kCuda = 2 };

// What a Schedule is for: forward() or backward(), or dispatch() or combine() alone, which heed few of its fields.
enum class Operation : int { kLayer = 0, kDispatch = 1, kCombine = 2 };

enum class Fusion : int { kNone = 0, kPairs = 1, kLayer = 2 };
enum class DispatchTransport : int { kPull = 0, kPush = 1 };
enum class CommWhere : int { kWarps = 0, kSms = 1 };
enum class Interleave : int { kPhased = 0, kMixed = 1 };
enum class ExpertOrder : int { kAscending = 0, kHeavyFirst = 1 };
enum class QueueKind : int { kStatic = 0, kDynamic = 1 };
enum class Pipeline : int { kCooperative = 0, kPingpong = 1 };
enum class CombineTransport : int { kEpilogue = 0, kStaged = 1 };
enum class WgradOrder : int { kAfter = 0, kFill = 1, kMixed = 2 };
enum class SaveXg : int { kKeep = 0, kRedispatch = 1 };
enum class SaveZ : int { kKeep = 0, kRecompute = 1 };

// The stages that multiply matrices; tile fields may be qualified by them (tile.fc1.n).
enum class GemmStage : int { kFc1 = 0, kFc2, kDgradFc2, kDgradFc1, kWgradFc2, kWgradFc1 };
inline constexpr int kGemmStageCount = 6;

// The output tile of a GEMM stage. For fc1, n counts gate and up columns together: n = 256 is 128 of each.
struct TileShape {
  int m = 128;      // rows: 64, 128 or 256
  int n = 256;      // columns: 64, 128, 192 or 256 (fc1: 128 or 256)
  int k = 64;       // depth of one pipeline stage: 32, 64 or 128
  int stages = 4;   // pipeline stages: 2 to 8
  int cluster = 2;  // CTAs that share the weight tile: 1 or 2
  Pipeline pipeline = Pipeline::kCooperative;
  bool operator==(const TileShape&) const = default;
};

// A stage's own values; what is not given falls back to Schedule::tile.
struct TileOverride {
  std::optional<int> m, n, k, stages, cluster;
  std::optional<Pipeline> pipeline;
  bool operator==(const TileOverride&) const = default;
};

struct DispatchSchedule {
  DispatchTransport transport = DispatchTransport::kPull;
  bool dedup = true;
  bool operator==(const DispatchSchedule&) const = default;
};

struct CommSchedule {
  CommWhere where = CommWhere::kWarps;
  int dispatch_sms = 0;
  int relay_sms = 0;
  int combine_sms = 0;
  int reduce_sms = 0;
  int chunk_bytes = 4096;
  int stages = 4;
  int reserve_sms = 0;
  bool lend_sms = false;
  bool operator==(const CommSchedule&) const = default;
};

struct OrderSchedule {
  int experts_per_wave = 1;
  int blocks_per_wave = 0;  // 0: whole experts
  ExpertOrder experts = ExpertOrder::kAscending;
  Interleave interleave = Interleave::kMixed;
  int second_share = 0;  // sixteenths; 0: by work
  bool source_rotation = true;
  int raster = 8;
  bool operator==(const OrderSchedule&) const = default;
};

struct CombineSchedule {
  CombineTransport transport = CombineTransport::kEpilogue;
  int column_chunks = 1;
  bool operator==(const CombineSchedule&) const = default;
};

// How a Program is mapped onto a machine, for one direction. No value changes a bit of the result. The reference with
// every field's values and meaning is docs/schedule.md, generated from schedule_fields().
struct Schedule {
  Fusion fusion = Fusion::kLayer;
  DispatchSchedule dispatch;
  CommSchedule comm;
  OrderSchedule order;
  QueueKind queue = QueueKind::kStatic;
  TileShape tile;
  std::array<TileOverride, kGemmStageCount> stage_tile;
  CombineSchedule combine;
  WgradOrder wgrad = WgradOrder::kFill;  // backward.wgrad
  int wgrad_reserve = 5;                 // backward.wgrad_reserve, in sixteenths
  SaveXg save_xg = SaveXg::kKeep;        // save.xg
  SaveZ save_z = SaveZ::kKeep;           // save.z
  bool operator==(const Schedule&) const = default;

  // The tile of a stage, its own values before the common ones.
  UNIEP_API TileShape tile_of(GemmStage stage) const;
};

// Where a Schedule runs.
struct Machine {
  EngineKind engine = EngineKind::kCpu;
  int ranks = 1;
  int workers = 1;                             // compute units of a rank: threads on cpu, SMs on cuda
  int64_t shared_memory_bytes = 227LL * 1024;  // of one compute unit; only the cuda engine is bound by it
  bool processes = false;                      // one process per rank; peers then reach less of each other's memory
};

// What a Schedule is validated against and filled for. A dispatch's or a combine's direction is forward.
struct ScheduleRequest {
  Direction direction = Direction::kForward;
  LayerShape shape{};
  Numerics numerics{};
  Machine machine{};
  Operation operation = Operation::kLayer;
};

// One field: its dotted name, what it does, and the strategy of the literature that it covers.
struct ScheduleField {
  std::string name;
  std::string meaning;
  std::string strategy;
  std::vector<std::string> words;  // the legal words (word i stands for value i), or empty for a number
  int minimum = 0, maximum = 0;    // of a number
  bool power_of_two = false;       // of a number
  std::vector<int> numbers;        // the legal numbers where they are few, else empty
};
// All fields, in the order in which they are printed; stage-qualified tile fields come last.
UNIEP_API const std::vector<ScheduleField>& schedule_fields();

// Fields that a user gave, by dotted name; the rest is open.
class UNIEP_API PartialSchedule {
 public:
  // Reads "key=value,key=value", or flat JSON ({"fusion": "layer", "tile.n": 256}), or "auto" (nothing given). Throws
  // Error(kInvalidArgument) that names the field, the value and what is legal; a field given twice is refused, too.
  static PartialSchedule parse(std::string_view text);
  // Every field of a whole schedule. Throws Error(kInvalidArgument) for a value out of its field's own range.
  static PartialSchedule from(const Schedule& schedule);

  // Gives a field its value, in place of an earlier one. Throws as parse() does.
  void set(std::string_view name, std::string_view value);
  bool given(std::string_view name) const;
  const std::vector<std::pair<std::string, std::string>>& values() const& { return values_; }
  std::vector<std::pair<std::string, std::string>> values() && { return std::move(values_); }

 private:
  std::vector<std::pair<std::string, std::string>> values_;  // in the order of schedule_fields()
};

// Flat JSON with the dotted names as keys (one line), and "key=value,key=value". Stage-qualified tile fields appear
// only where given. parse(print(s)) gives s.
UNIEP_API std::string to_json(const Schedule& schedule);
UNIEP_API std::string to_text(const Schedule& schedule);

// Completes what is open so that the whole is legal for this shape, machine and operation; what was given stays as
// given (and may make the whole illegal: validate() says why). What it says is what runs: on cuda a legal Schedule has
// a kernel with exactly its rings, tiles and stages. For an exchange (a forward one) the defaults are what measured
// best alone (docs/exchange_performance.md).
UNIEP_API Schedule fill(const PartialSchedule& given, const ScheduleRequest& request);

// Every violated rule, in words; empty when the schedule is legal.
UNIEP_API std::vector<std::string> validate(const Schedule& schedule, const ScheduleRequest& request);

// fill() then validate(); throws Error(kInvalidArgument) with all violated rules.
UNIEP_API Schedule resolve(const PartialSchedule& given, const ScheduleRequest& request);

}  // namespace uniep
