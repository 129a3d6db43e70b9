#include "program/canonical.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "program/build.h"
#include "program/recompute.h"

namespace uniep {
namespace {

bool is_backward(const RuleContext& c) {
  return c.direction == Direction::kBackward;
}

int lend_sms(const Schedule& s, const RuleContext&) {
  return s.comm.lend_sms && s.comm.reserve_sms > 0 ? 1 : 0;
}

int64_t unreserved(const Schedule& s, const RuleContext& c) {
  return c.workers - program::idle_workers(s);
}

// Workers that go together: as the engine has it, whatever the field says.
int cluster_of(const Schedule& s, const RuleContext& c) {
  return c.cuda ? s.tile_of(stages_of(c.direction).front()).cluster : 1;
}

// Whether the order of anything depends on waves: both GEMMs in one launch; pushes, which are one wave ahead of the
// receiver; or both weight gradients in one launch, which alternate.
bool goes_by_waves(const Schedule& s, const RuleContext& c) {
  if (is_backward(c) && s.wgrad == WgradOrder::kMixed) return false;  // it has waves of its own
  if (s.fusion == Fusion::kLayer || s.dispatch.transport == DispatchTransport::kPush) return true;
  return is_backward(c) && s.fusion != Fusion::kNone && !dispatches_x_again(s, true);
}

bool mixes(const Schedule& s, const RuleContext& c) {
  return s.fusion == Fusion::kLayer && s.order.interleave == Interleave::kMixed &&
         (s.order.experts_per_wave < c.local_experts || s.order.blocks_per_wave > 0);
}

int waves(const Schedule& s, const RuleContext& c) {
  return goes_by_waves(s, c) ? s.order.experts_per_wave : static_cast<int>(c.local_experts);
}
// Row blocks go in whole clusters.
int blocks_per_wave(const Schedule& s, const RuleContext& c) {
  const int given = s.order.blocks_per_wave;
  return given > 0 ? std::max(given, cluster_of(s, c)) : 0;
}
int experts(const Schedule& s, const RuleContext& c) {
  return static_cast<int>(c.local_experts == 1 ? ExpertOrder::kAscending : s.order.experts);
}
int second_share(const Schedule& s, const RuleContext& c) {
  return mixes(s, c) && s.queue == QueueKind::kDynamic ? s.order.second_share : 0;
}
int interleave(const Schedule& s, const RuleContext& c) {
  return static_cast<int>(mixes(s, c) ? Interleave::kMixed : Interleave::kPhased);
}
int queue(const Schedule& s, const RuleContext& c) {
  const bool mixes_any = mixes(s, c) || (is_backward(c) && s.wgrad == WgradOrder::kMixed);
  const bool alone = unreserved(s, c) == 1 && !mixes_any;
  return static_cast<int>(alone ? QueueKind::kStatic : s.queue);
}
int source_rotation(const Schedule& s, const RuleContext& c) {
  return s.order.source_rotation || c.ranks == 1 ? 1 : 0;
}
int dedup(const Schedule& s, const RuleContext& c) {
  return s.dispatch.dedup || c.topk == 1 || c.local_experts == 1 ? 1 : 0;
}
int raster(const Schedule& s, const RuleContext& c) {
  const int cluster = cluster_of(s, c);
  return std::max(1, s.order.raster / cluster) * cluster;
}
int chunk_bytes(const Schedule& s, const RuleContext& c) {
  constexpr int64_t kMin = 512;
  const auto row = static_cast<uint64_t>(std::max(kMin, c.hidden * 2));
  return static_cast<int>(std::min<uint64_t>(s.comm.chunk_bytes, std::bit_ceil(row)));
}
int column_chunks(const Schedule& s, const RuleContext& c) {
  const int given = s.combine.column_chunks;
  return std::min<int>(given, static_cast<int>(column_chunk_bounds(c.hidden, given).size()) - 1);
}
int wgrad(const Schedule& s, const RuleContext& c) {
  return static_cast<int>(is_backward(c) ? s.wgrad : WgradOrder::kAfter);
}
int wgrad_reserve(const Schedule& s, const RuleContext& c) {
  return is_backward(c) && s.wgrad == WgradOrder::kMixed ? s.wgrad_reserve : Schedule{}.wgrad_reserve;
}
int save_xg(const Schedule& s, const RuleContext& c) {
  return static_cast<int>(is_backward(c) ? s.save_xg : SaveXg::kKeep);
}
int save_z(const Schedule& s, const RuleContext& c) {
  return static_cast<int>(is_backward(c) ? s.save_z : SaveZ::kKeep);
}
int cluster(const Schedule& s, const RuleContext& c) {
  return c.cuda ? s.tile.cluster : 1;
}
int pipeline(const Schedule& s, const RuleContext& c) {
  return static_cast<int>(c.cuda ? s.tile.pipeline : Pipeline::kCooperative);
}

constexpr FieldMask bits(std::initializer_list<FieldId> fields) {
  FieldMask mask = 0;
  for (const FieldId field : fields) mask |= field_bit(field);
  return mask;
}

// The value that a field gets, by what the Schedule says, not by what other fields get.
struct Step {
  FieldId field;
  FieldMask reads;  // beside the field
  int (*value)(const Schedule&, const RuleContext&);
  const char* why;
};

constexpr std::array kSteps{
    Step{kDispatchDedup, 0, dedup, "no token has two experts on a rank"},
    Step{kCommChunkBytes, 0, chunk_bytes, "a row is no longer than that"},
    Step{kCommLendSms, bits({kCommReserveSms}), lend_sms, "nothing is reserved"},
    Step{kOrderExpertsPerWave, bits({kFusion, kDispatchTransport, kBackwardWgrad, kSaveXg, kSaveZ}), waves,
         "nothing goes by waves without fusion=layer, push or weight gradients that alternate"},
    Step{kOrderBlocksPerWave, bits({kTileCluster}), blocks_per_wave, "row blocks go in whole clusters"},
    Step{kOrderExperts, 0, experts, "a rank has one expert"},
    Step{kOrderInterleave, bits({kFusion, kOrderExpertsPerWave, kOrderBlocksPerWave}), interleave, "there is one wave"},
    Step{kOrderSecondShare, bits({kFusion, kOrderInterleave, kOrderExpertsPerWave, kOrderBlocksPerWave, kQueue}),
         second_share, "the two GEMMs do not have a queue each"},
    Step{kOrderSourceRotation, 0, source_rotation, "there is one rank"},
    Step{kOrderRaster, bits({kTileCluster}), raster, "row blocks go in whole clusters"},
    Step{kQueue,
         bits({kFusion, kOrderInterleave, kOrderExpertsPerWave, kOrderBlocksPerWave, kCommReserveSms, kCommLendSms,
               kBackwardWgrad}),
         queue, "one worker takes everything in order"},
    Step{kTileCluster, 0, cluster, "the cpu engine ignores it"},
    Step{kTilePipeline, 0, pipeline, "the cpu engine ignores it"},
    Step{kCombineColumnChunks, 0, column_chunks, "the other chunks would be empty"},
    Step{kBackwardWgrad, 0, wgrad, "forward ignores it"},
    Step{kBackwardWgradReserve, bits({kBackwardWgrad}), wgrad_reserve, "forward ignores it"},
    Step{kSaveXg, 0, save_xg, "forward takes as long either way"},
    Step{kSaveZ, 0, save_z, "forward takes as long either way"},
};

bool is_tile_field_ignored(FieldId field, const RuleContext& c) {
  return !c.cuda && (field == kTileCluster || field == kTilePipeline);
}

// The common tile is the first stage's; the others have a value of their own where theirs differs.
void unite_tiles(Schedule& schedule, const RuleContext& c) {
  const std::vector<GemmStage> stages = stages_of(c.direction);
  const Schedule given = schedule;
  const auto own = [](GemmStage stage, int tile_field) { return stage_field(stage, static_cast<FieldId>(tile_field)); };
  for (int field = kTileM; field <= kTilePipeline; ++field) {
    const auto value_of = [&](GemmStage stage) {
      const std::optional<int> value = descriptor_of(own(stage, field)).get(given);
      return value ? *value : descriptor_of(field).get(given).value();
    };
    for (int stage = 0; stage < kGemmStageCount; ++stage) {
      descriptor_of(own(static_cast<GemmStage>(stage), field)).set(schedule, std::nullopt);
    }
    if (is_tile_field_ignored(static_cast<FieldId>(field), c)) continue;
    const int common = value_of(stages.front());
    descriptor_of(field).set(schedule, common);
    for (const GemmStage stage : stages) {
      if (value_of(stage) != common) descriptor_of(own(stage, field)).set(schedule, value_of(stage));
    }
  }
}

std::string with_value(int field, const Schedule& schedule) {
  const std::optional<int> value = descriptor_of(field).get(schedule);
  return name_of(field) + "=" + (value ? value_text(descriptor_of(field).field, *value) : "(none)");
}

Schedule canonical_in(const Schedule& schedule, const RuleContext& c) {
  Schedule result = schedule;
  unite_tiles(result, c);
  for (const Step& step : kSteps) {
    const bool is_tile = (field_bit(step.field) & tile_mask()) != 0;
    if (!is_tile || is_tile_field_ignored(step.field, c)) {
      descriptor_of(step.field).set(result, step.value(schedule, c));
    }
  }
  return result;
}

template <std::size_t kStep>
bool keeps(const Schedule& s, const RuleContext& c, GemmStage) {
  constexpr const Step& kOwn = kSteps[kStep];
  return descriptor_of(kOwn.field).get(s) == kOwn.value(s, c);
}

template <std::size_t... kStep>
void add_rules(std::vector<Rule>& rules, FieldMask varied, std::index_sequence<kStep...>) {
  const auto add = [&](const Step& step, bool (*holds)(const Schedule&, const RuleContext&, GemmStage)) {
    if ((varied & field_bit(step.field)) != 0) rules.push_back({field_bit(step.field) | step.reads, {}, holds, {}});
  };
  (add(kSteps[kStep], keeps<kStep>), ...);
}

// A common tile field that no stage reads: its first value stands for all.
template <int kField>
bool is_first_value(const Schedule& s, const RuleContext&, GemmStage) {
  return descriptor_of(kField).get(s) == legal_values(descriptor_of(kField).field).front();
}

template <int kField>
void add_unread_rule(std::vector<Rule>& rules, FieldMask varied, const Schedule& base, const RuleContext& c) {
  const std::vector<GemmStage> stages = stages_of(c.direction);
  const bool is_read = std::any_of(stages.begin(), stages.end(), [&](GemmStage stage) {
    return !descriptor_of(stage_field(stage, static_cast<FieldId>(kField))).get(base);
  });
  if (is_read || (varied & field_bit(kField)) == 0 || is_tile_field_ignored(static_cast<FieldId>(kField), c)) return;
  rules.push_back({field_bit(kField), {}, is_first_value<kField>, {}});
}

}  // namespace

Schedule canonical(const Schedule& schedule, const ScheduleRequest& request) {
  return canonical_in(schedule, rule_context(request));
}

std::vector<std::string> canonical_reasons(const Schedule& schedule, const ScheduleRequest& request) {
  const Schedule result = canonical(schedule, request);
  std::vector<std::string> reasons;
  for (int field = 0; field < kFieldCount; ++field) {
    const FieldDescriptor& descriptor = descriptor_of(field);
    if (descriptor.get(schedule) == descriptor.get(result)) continue;
    const auto step =
        std::find_if(kSteps.begin(), kSteps.end(), [field](const Step& candidate) { return candidate.field == field; });
    const bool is_tile = descriptor.stage || (field_bit(field) & tile_mask()) != 0;
    const char* const why = is_tile ? "the stages have these tiles either way" : step->why;
    reasons.push_back(fmt::format("{} is {}: {}", with_value(field, schedule), with_value(field, result), why));
  }
  return reasons;
}

std::vector<std::string> canonical_differences(const Schedule& one, const Schedule& other,
                                               const ScheduleRequest& request) {
  const Schedule a = canonical(one, request);
  const Schedule b = canonical(other, request);
  std::vector<std::string> differences;
  for (int field = 0; field < kFieldCount; ++field) {
    if (descriptor_of(field).get(a) == descriptor_of(field).get(b)) continue;
    differences.push_back(with_value(field, a) + " against " + with_value(field, b));
  }
  return differences;
}

std::vector<Rule> canonical_rules(FieldMask varied, const Schedule& base, const RuleContext& context) {
  std::vector<Rule> rules;
  FieldMask steps = varied;
  if (context.cuda) steps &= ~(field_bit(kTileCluster) | field_bit(kTilePipeline));
  add_rules(rules, steps, std::make_index_sequence<kSteps.size()>());
  add_unread_rule<kTileN>(rules, varied, base, context);
  add_unread_rule<kTileK>(rules, varied, base, context);
  add_unread_rule<kTileStages>(rules, varied, base, context);
  add_unread_rule<kTileCluster>(rules, varied, base, context);
  add_unread_rule<kTilePipeline>(rules, varied, base, context);
  return rules;
}

}  // namespace uniep
