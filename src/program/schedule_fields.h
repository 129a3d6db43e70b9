#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "uniep/schedule.h"

// The one table of a Schedule's fields. Parsing, printing, range checks, enumeration, sampling and docs/schedule.md are
// driven by it; adding a field is adding a row.
namespace uniep {

// Every field, in the order in which it is printed. A stage's own tile field follows as stage_field(stage, kTileM...).
enum FieldId : int {
  kFusion,
  kDispatchTransport,
  kDispatchDedup,
  kCommWhere,
  kCommDispatchSms,
  kCommRelaySms,
  kCommCombineSms,
  kCommReduceSms,
  kCommChunkBytes,
  kCommStages,
  kCommReserveSms,
  kCommLendSms,
  kOrderExpertsPerWave,
  kOrderBlocksPerWave,
  kOrderExperts,
  kOrderInterleave,
  kOrderSecondShare,
  kOrderSourceRotation,
  kOrderRaster,
  kQueue,
  kTileM,
  kTileN,
  kTileK,
  kTileStages,
  kTileCluster,
  kTilePipeline,
  kCombineTransport,
  kCombineColumnChunks,
  kBackwardWgrad,
  kBackwardWgradReserve,
  kSaveXg,
  kSaveZ,
  kCommonFieldCount,
};
inline constexpr int kTileFieldCount = kTilePipeline - kTileM + 1;
inline constexpr int kFieldCount = kCommonFieldCount + kGemmStageCount * kTileFieldCount;

constexpr FieldId stage_field(GemmStage stage, FieldId tile_field) {
  return static_cast<FieldId>(kCommonFieldCount + static_cast<int>(stage) * kTileFieldCount + (tile_field - kTileM));
}

// A set of fields, one bit each.
__extension__ using FieldMask = unsigned __int128;
static_assert(kFieldCount <= 128, "a FieldMask holds one bit a field");
constexpr FieldMask field_bit(int field) {
  return FieldMask{1} << field;
}
constexpr int field_count(FieldMask mask) {
  return std::popcount(static_cast<uint64_t>(mask)) + std::popcount(static_cast<uint64_t>(mask >> 64));
}
// Of a mask with one bit at least.
constexpr int first_field(FieldMask mask) {
  const auto low = static_cast<uint64_t>(mask);
  return low != 0 ? std::countr_zero(low) : 64 + std::countr_zero(static_cast<uint64_t>(mask >> 64));
}
constexpr FieldMask tile_mask() {
  return (field_bit(kTilePipeline) << 1) - field_bit(kTileM);
}
constexpr FieldMask stage_mask(GemmStage stage) {
  return tile_mask() << (stage_field(stage, kTileM) - kTileM);
}

// A field's values are ints: the number, or the index of its word; a stage's own tile field may be without a value.
struct FieldDescriptor {
  ScheduleField field;
  std::optional<GemmStage> stage;  // of a stage's own tile field
  std::function<std::optional<int>(const Schedule&)> get;
  std::function<void(Schedule&, std::optional<int>)> set;  // without a value: only for a stage's own tile field
};

// Indexed by FieldId.
const std::vector<FieldDescriptor>& field_descriptors();
inline const FieldDescriptor& descriptor_of(int field) {
  return field_descriptors()[field];
}
inline const std::string& name_of(int field) {
  return descriptor_of(field).field.name;
}

const char* stage_label(GemmStage stage);                  // "fc1", "fc2", "dgrad_fc2", ...
std::vector<GemmStage> stages_of(Direction direction);     // that a direction runs
std::optional<FieldId> find_field(std::string_view name);  // by its dotted name
std::string nearest_field_name(std::string_view name);     // by edit distance, for messages

bool is_legal_value(const ScheduleField& field, int value);
std::vector<int> legal_values(const ScheduleField& field,  // ascending, up to `most`
                              int64_t most = std::numeric_limits<int64_t>::max());
std::string legal_text(const ScheduleField& field);  // "64, 128 or 256", "1 to 16", ...
std::string value_text(const ScheduleField& field, int value);
// The value that a text stands for. Throws Error(kInvalidArgument) that names field, value and what is legal.
int parse_value(const ScheduleField& field, std::string_view text);

// Text from outside, fit for a one-line message: only printable ASCII, cut where it is long.
std::string printable(std::string_view text);

// docs/schedule.md, whole.
std::string schedule_reference_markdown();

}  // namespace uniep
