#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "program/default_order.h"
#include "program/schedule_rules.h"

// Completes a schedule. Each decision looks at what was given and at the decisions before it; none changes what was
// given.
namespace uniep {
namespace {

// An open field and the values to try, the preferred one first. nullopt: a stage's own field stays without a value.
struct Choice {
  int field;
  std::vector<std::optional<int>> values;
};

// Finds the assignment with the fewest violations, of several the first, the last choice varying fastest. `violations`
// may complete the schedule further before it counts.
class FewestViolations {
 public:
  using Count = std::function<int(Schedule&)>;

  FewestViolations(const std::vector<Choice>& choices, const Count& violations)
      : choices_(choices), violations_(violations) {}

  // Leaves the best assignment in `schedule`, and returns its violations.
  int search(Schedule& schedule) {
    search(schedule, 0);
    schedule = best_;
    return fewest_;
  }

 private:
  void search(const Schedule& schedule, std::size_t depth) {
    Schedule tried = schedule;
    if (depth == choices_.size()) {
      const int count = violations_(tried);
      if (count >= fewest_) return;
      fewest_ = count;
      best_ = tried;
      return;
    }
    for (const std::optional<int> value : choices_[depth].values) {
      descriptor_of(choices_[depth].field).set(tried, value);
      search(tried, depth + 1);
      if (fewest_ == 0) return;
    }
  }

  const std::vector<Choice>& choices_;
  const Count& violations_;
  int fewest_ = std::numeric_limits<int>::max();
  Schedule best_;
};

class Filler {
 public:
  Filler(const PartialSchedule& given, const RuleContext& context, const DefaultOrder& order)
      : context_(context), order_(order), rules_(schedule_rules(context)) {
    if (!context.cuda) schedule_.tile = TileShape{64, 128, 64, 4, 1, Pipeline::kCooperative};
    for (const auto& [name, value] : given.values()) {
      const FieldId field = find_field(name).value();
      given_ |= field_bit(field);
      descriptor_of(field).set(schedule_, parse_value(descriptor_of(field).field, value));
    }
  }

  Schedule fill() {
    complete_launches();
    const bool asks_for_sms =
        schedule_.comm.dispatch_sms > 0 || schedule_.comm.combine_sms > 0 || schedule_.comm.reduce_sms > 0;
    if (is_open(kCommWhere)) schedule_.comm.where = asks_for_sms ? CommWhere::kSms : CommWhere::kWarps;
    complete_workers();
    complete_order();
    const Schedule open_tiles = schedule_;
    const int with_warps = complete_tiles();
    // Without copy warps the ring needs no shared memory of its own.
    if (with_warps > 0 && schedule_.comm.where == CommWhere::kWarps && is_open(kCommWhere) &&
        is_open(kCommDispatchSms)) {
      const Schedule best_with_warps = schedule_;
      schedule_ = open_tiles;
      schedule_.comm.where = CommWhere::kSms;
      complete_workers();
      if (complete_tiles() >= with_warps) schedule_ = best_with_warps;
    }
    return schedule_;
  }

 private:
  bool is_open(FieldId field) const { return (given_ & field_bit(field)) == 0; }

  // The rules that read one of these fields, and no field beyond `within`.
  std::vector<const Rule*> rules_reading(FieldMask reading, FieldMask within = ~FieldMask{0}) const {
    std::vector<const Rule*> rules;
    for (const Rule& rule : rules_) {
      if ((rule.reads & reading) != 0 && (rule.reads & ~within) == 0) rules.push_back(&rule);
    }
    return rules;
  }

  int violated(const std::vector<const Rule*>& rules, const Schedule& schedule) const {
    return static_cast<int>(std::count_if(
        rules.begin(), rules.end(), [&](const Rule* rule) { return !rule->holds(schedule, context_, rule->stage); }));
  }

  void complete_launches() {
    if (is_open(kOrderInterleave)) {
      schedule_.order.interleave = schedule_.fusion == Fusion::kLayer ? order_.interleave : Interleave::kPhased;
    }
    if (is_open(kBackwardWgrad)) {
      schedule_.wgrad = schedule_.fusion == Fusion::kNone ? WgradOrder::kAfter : WgradOrder::kFill;
    }
    if (is_open(kQueue)) schedule_.queue = order_.queue;
  }

  void complete_order() {
    if (is_open(kOrderExpertsPerWave)) {
      const bool by_waves = schedule_.order.interleave == Interleave::kMixed && order_.mixed_waves > 0;
      const int64_t experts = by_waves ? std::max<int64_t>(context_.local_experts / order_.mixed_waves, 1)
                                       : std::min<int64_t>(order_.experts_per_wave, context_.local_experts);
      schedule_.order.experts_per_wave = static_cast<int>(experts);
    }
    if (is_open(kOrderRaster)) schedule_.order.raster = order_.raster;
    // A band is summed while the next one is multiplied: in one launch, and where the GEMM itself brings the rows back.
    if (is_open(kCombineColumnChunks) && schedule_.fusion != Fusion::kNone &&
        schedule_.combine.transport == CombineTransport::kEpilogue) {
      schedule_.combine.column_chunks = order_.column_chunks;
    }
  }

  void complete_workers() {
    CommSchedule& comm = schedule_.comm;
    const bool on_sms = comm.where == CommWhere::kSms;
    if (is_open(kCombineTransport)) {
      const bool staged = context_.combine_groups > 0 || comm.combine_sms > 0;
      schedule_.combine.transport = staged ? CombineTransport::kStaged : CombineTransport::kEpilogue;
    }
    if (is_open(kCommReserveSms) && context_.workers % 2 != 0 && context_.workers > 1 && asks_for_clusters()) {
      comm.reserve_sms = 1;
    }
    const int64_t available = context_.workers - comm.reserve_sms;
    if (is_open(kCommDispatchSms)) {
      comm.dispatch_sms = on_sms ? smallest_kind(available, available - comm.combine_sms - comm.reduce_sms) : 0;
    }
    if (is_open(kCommCombineSms) && on_sms && schedule_.combine.transport == CombineTransport::kStaged) {
      const int64_t left = available - comm.reduce_sms - std::max(1, comm.dispatch_sms);
      comm.combine_sms = left >= 1 ? smallest_kind(available, left) : 0;
    }
  }

  // Whether clusters of two were asked for, on cuda.
  bool asks_for_clusters() const {
    const std::vector<GemmStage> stages = stages_of(context_.direction);
    return context_.cuda && std::any_of(stages.begin(), stages.end(), [this](GemmStage stage) {
             const bool given = !is_open(kTileCluster) || !is_open(stage_field(stage, kTileCluster));
             return given && schedule_.tile_of(stage).cluster == 2;
           });
  }

  // The fewest workers of a kind that copies: on cuda a whole cluster, where the other kinds come in clusters.
  int smallest_kind(int64_t available, int64_t left) const {
    const CommSchedule& comm = schedule_.comm;
    const bool even =
        available % 2 == 0 && comm.dispatch_sms % 2 == 0 && comm.combine_sms % 2 == 0 && comm.reduce_sms % 2 == 0;
    return context_.cuda && even && left >= 2 ? 2 : 1;
  }

  std::vector<Choice> open_choices(const std::vector<Choice>& choices) const {
    std::vector<Choice> open;
    for (const Choice& choice : choices) {
      if (is_open(static_cast<FieldId>(choice.field))) open.push_back(choice);
    }
    return open;
  }

  bool has_own_tile(GemmStage stage) const { return (given_ & stage_mask(stage)) != 0; }

  // Values of its own that a stage may get beside those that were given, the smallest last. A stage that was given none
  // gets none, but for fc1's columns: tile.n may have values that fc1 may not.
  std::vector<Choice> own_choices(GemmStage stage) const {
    const auto own = [stage](FieldId field) { return stage_field(stage, field); };
    const bool is_fc1 = stage == GemmStage::kFc1;
    std::vector<Choice> choices;
    if (has_own_tile(stage)) {
      const bool is_wgrad = stage == GemmStage::kWgradFc2 || stage == GemmStage::kWgradFc1;
      if (is_wgrad) choices.push_back({own(kTileM), {std::nullopt, 128, 64}});
      choices.push_back({own(kTileN), {std::nullopt, 128, 64}});
      if (is_fc1) choices.back().values.pop_back();
      choices.push_back({own(kTilePipeline), {std::nullopt, 0, 1}});
      choices.push_back({own(kTileK), {std::nullopt, 64, 32}});
      choices.push_back({own(kTileStages), {std::nullopt, 3, 2}});
      choices.push_back({own(kTileCluster), {std::nullopt, 1}});
    } else if (is_fc1) {
      choices.push_back({own(kTileN), {std::nullopt, 128}});
    }
    return open_choices(choices);
  }

  // The ring and the row block first, then the rest of the common tile, then what single stages need. Values in a list
  // get smaller: where the last one does not fit, no other does. Returns the number of violated rules.
  int complete_tiles() {
    const TileShape tile = schedule_.tile;
    Choice rows{kTileM, {}};
    for (const GemmStage stage : {GemmStage::kFc1, GemmStage::kFc2, GemmStage::kDgradFc2, GemmStage::kDgradFc1}) {
      if (const std::optional<int> own = schedule_.stage_tile[static_cast<int>(stage)].m)
        rows.values.emplace_back(*own);
    }
    rows.values.insert(rows.values.end(), {tile.m, 64});
    const std::vector<Choice> choices = open_choices({rows,
                                                      {kCommStages, {4, 2, 1}},
                                                      {kCommChunkBytes, {4096, 2048, 1024, 512}},
                                                      {kTileN, {tile.n, 128, 64}},
                                                      {kTilePipeline, {0, 1}},
                                                      {kTileK, {tile.k, 32}},
                                                      {kTileStages, {tile.stages, 3, 2}},
                                                      {kTileCluster, {tile.cluster, 1}}});
    struct Stage {
      std::vector<Choice> choices;
      std::vector<const Rule*> rules;
    };
    std::vector<Stage> stages;
    for (const GemmStage stage : stages_of(context_.direction)) {
      stages.push_back({own_choices(stage), rules_reading(stage_mask(stage))});
    }
    constexpr FieldMask kRing = field_bit(kCommChunkBytes) | field_bit(kCommStages);
    const std::vector<const Rule*> ring_rules = rules_reading(kRing, kRing);

    int fewest = std::numeric_limits<int>::max();
    const FewestViolations::Count count = [&](Schedule& tried) {
      int total = violated(ring_rules, tried);
      for (const Stage& stage : stages) {
        if (total >= fewest) return total;
        const FewestViolations::Count count_stage = [&](Schedule& own) { return violated(stage.rules, own); };
        total +=
            stage.choices.empty() ? count_stage(tried) : FewestViolations(stage.choices, count_stage).search(tried);
      }
      fewest = std::min(fewest, total);
      return total;
    };
    return FewestViolations(choices, count).search(schedule_);
  }

  RuleContext context_;
  DefaultOrder order_;
  std::vector<Rule> rules_;
  Schedule schedule_;
  FieldMask given_ = 0;
};

}  // namespace

Schedule fill(const PartialSchedule& given, Direction direction, const LayerShape& shape, const Numerics& numerics,
              const Machine& machine) {
  return Filler(given, rule_context(direction, shape, numerics, machine), default_order(shape, machine)).fill();
}

}  // namespace uniep
