#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "program/default_order.h"
#include "program/kernel_memory.h"
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

// The most stages of an exchange's rings that the kernel has room for beside as many warps as it should have.
int exchange_stages(Operation operation, int chunk_bytes) {
  // Of a combine, one slice is on its way while another is added.
  const int warps = operation == Operation::kDispatch ? cuda::kExchangeWarps : cuda::combine_warps(chunk_bytes, 2);
  int stages = cuda::kMaxCopyStages;
  while (stages > 1 && cuda::exchange_kernel_bytes(warps, chunk_bytes, stages) > cuda::kSharedMemoryLimit) --stages;
  return stages;
}

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
    if (context_.operation != Operation::kLayer) {
      complete_exchange();
      return schedule_;
    }
    const bool has_reserve = schedule_.wgrad_reserve != Schedule{}.wgrad_reserve;
    if (has_reserve && context_.direction == Direction::kBackward && is_open(kBackwardWgrad)) {
      schedule_.wgrad = WgradOrder::kMixed;
      given_ |= field_bit(kBackwardWgrad);
    }
    if (is_backward_on_cuda()) {
      complete_backward_on_cuda();
      return schedule_;
    }
    const Schedule open = schedule_;
    const int in_one_kernel = complete();
    // On cuda the stages of one kernel have one tile; in two launches each may have its own.
    const bool given_mixed = !is_open(kOrderInterleave) && open.order.interleave == Interleave::kMixed;
    const bool needs_one = given_mixed || open.order.blocks_per_wave > 0 || open.order.second_share > 0;
    if (in_one_kernel > 0 && is_open(kFusion) && !needs_one) {
      const Schedule best = schedule_;
      schedule_ = open;
      schedule_.fusion = Fusion::kPairs;
      if (complete() >= in_one_kernel) schedule_ = best;
    }
    return schedule_;
  }

 private:
  // Returns the number of violated rules about tiles.
  int complete() {
    complete_launches();
    const CommSchedule& comm = schedule_.comm;
    const bool asks_for_sms =
        comm.dispatch_sms > 0 || comm.relay_sms > 0 || comm.combine_sms > 0 || comm.reduce_sms > 0;
    if (is_open(kCommWhere)) schedule_.comm.where = asks_for_sms ? CommWhere::kSms : CommWhere::kWarps;
    if (is_open(kDispatchTransport) && comm.relay_sms > 0 && !is_backward_on_cuda()) {
      schedule_.dispatch.transport = DispatchTransport::kPush;
    }
    complete_workers();
    complete_order();
    return complete_tiles();
  }

  bool is_backward_on_cuda() const { return context_.cuda && context_.direction == Direction::kBackward; }

  bool mixes_wgrads() const {
    return context_.direction == Direction::kBackward && schedule_.wgrad == WgradOrder::kMixed;
  }

  // All of backward in one launch, with its weight gradients in that order, where all that was given goes with it.
  bool complete_in_one_launch(WgradOrder wgrad) {
    const Schedule open = schedule_;
    open_wgrad_ = wgrad;
    if (is_open(kFusion)) schedule_.fusion = Fusion::kLayer;
    if (is_open(kQueue) && wgrad == WgradOrder::kMixed) schedule_.queue = QueueKind::kDynamic;
    complete();
    if (schedule_.wgrad == wgrad && violated(rules_reading(~FieldMask{0}), schedule_) == 0) return true;
    schedule_ = open;
    open_wgrad_ = WgradOrder::kFill;
    return false;
  }

  // In launches of their own the weight gradients may have tiles of their own.
  void complete_backward_on_cuda() {
    const bool may_mix = order_.wgrad == WgradOrder::kMixed && is_open(kBackwardWgrad);
    if (may_mix && complete_in_one_launch(WgradOrder::kMixed)) return;
    if (is_open(kFusion)) {
      if (!mixes_wgrads() && complete_in_one_launch(WgradOrder::kFill)) return;
      schedule_.fusion = mixes_wgrads() ? Fusion::kLayer : Fusion::kPairs;
    }
    const Schedule open = schedule_;
    const int filling = complete();
    if (filling == 0 || !is_open(kBackwardWgrad) || schedule_.wgrad == WgradOrder::kAfter) return;
    const Schedule best = schedule_;
    schedule_ = open;
    open_wgrad_ = WgradOrder::kAfter;
    if (complete() >= filling) schedule_ = best;
  }

  bool is_open(FieldId field) const { return (given_ & field_bit(field)) == 0; }

  std::vector<const Rule*> rules_reading(FieldMask reading) const {
    std::vector<const Rule*> rules;
    for (const Rule& rule : rules_) {
      if ((rule.reads & reading) != 0) rules.push_back(&rule);
    }
    return rules;
  }

  int violated(const std::vector<const Rule*>& rules, const Schedule& schedule) const {
    return static_cast<int>(std::count_if(
        rules.begin(), rules.end(), [&](const Rule* rule) { return !rule->holds(schedule, context_, rule->stage); }));
  }

  void complete_launches() {
    if (is_open(kOrderInterleave)) {
      const bool may_mix = schedule_.fusion == Fusion::kLayer && !mixes_wgrads();
      const Interleave preferred = schedule_.order.second_share > 0 ? Interleave::kMixed : order_.interleave;
      schedule_.order.interleave = may_mix ? preferred : Interleave::kPhased;
    }
    if (is_open(kBackwardWgrad)) {
      schedule_.wgrad = schedule_.fusion == Fusion::kNone ? WgradOrder::kAfter : open_wgrad_;
    }
    if (is_open(kQueue)) {
      const bool by_tickets = mixes_wgrads() || schedule_.comm.lend_sms || schedule_.order.second_share > 0;
      schedule_.queue = by_tickets ? QueueKind::kDynamic : order_.queue;
    }
  }

  void complete_order() {
    if (is_open(kOrderExpertsPerWave)) {
      const bool by_waves = schedule_.order.interleave == Interleave::kMixed && order_.mixed_waves > 0;
      const int64_t experts = by_waves ? std::max<int64_t>(context_.local_experts / order_.mixed_waves, 1)
                                       : std::min<int64_t>(order_.experts_per_wave, context_.local_experts);
      schedule_.order.experts_per_wave = schedule_.order.blocks_per_wave > 0 ? 1 : static_cast<int>(experts);
    }
    if (is_open(kOrderRaster)) schedule_.order.raster = order_.raster;
    // A band is summed while the next one is multiplied: in one launch, and where the GEMM itself brings the rows back.
    if (is_open(kCombineColumnChunks) && schedule_.fusion != Fusion::kNone &&
        schedule_.combine.transport == CombineTransport::kEpilogue) {
      schedule_.combine.column_chunks = order_.column_chunks;
    }
  }

  // Dispatch or combine alone.
  void complete_exchange() {
    const bool asks_for_sms = schedule_.comm.dispatch_sms > 0 || schedule_.comm.combine_sms > 0;
    if (is_open(kCommWhere)) schedule_.comm.where = asks_for_sms ? CommWhere::kSms : CommWhere::kWarps;
    if (is_open(kFusion)) schedule_.fusion = Fusion::kNone;
    if (is_open(kOrderInterleave)) schedule_.order.interleave = Interleave::kPhased;
    if (is_open(kCombineTransport)) schedule_.combine.transport = CombineTransport::kStaged;
    if (is_open(kQueue)) schedule_.queue = order_.queue;
    complete_order();
    if (!context_.cuda) return;
    const bool combines = context_.operation == Operation::kCombine;
    if (combines && is_open(kCombineColumnChunks))
      schedule_.combine.column_chunks = context_.combine_groups > 0 ? 2 : 8;
    complete_exchange_rings(combines ? 8192 : 4096);
  }

  // The longest chunks up to those preferred that fit.
  void complete_exchange_rings(int preferred) {
    CommSchedule& comm = schedule_.comm;
    const std::vector<const Rule*> ring_rules = rules_reading(field_bit(kCommStages));
    if (is_open(kCommChunkBytes)) comm.chunk_bytes = preferred;
    for (;;) {
      if (is_open(kCommStages)) comm.stages = exchange_stages(context_.operation, comm.chunk_bytes);
      if (!is_open(kCommChunkBytes) || comm.chunk_bytes <= 512 || violated(ring_rules, schedule_) == 0) return;
      comm.chunk_bytes /= 2;
    }
  }

  void complete_workers() {
    CommSchedule& comm = schedule_.comm;
    const bool on_sms = comm.where == CommWhere::kSms;
    if (is_open(kCombineTransport)) {
      const bool staged = context_.combine_groups > 0 || comm.combine_sms > 0;
      schedule_.combine.transport = staged ? CombineTransport::kStaged : CombineTransport::kEpilogue;
    }
    if (is_open(kCommReserveSms) && !comm.lend_sms && context_.workers % 2 != 0 && context_.workers > 1 &&
        asks_for_clusters()) {
      comm.reserve_sms = 1;
    }
    const int64_t available = context_.workers - comm.reserve_sms;
    if (is_open(kCommDispatchSms)) {
      const int64_t left = available - comm.relay_sms - comm.combine_sms - comm.reduce_sms;
      comm.dispatch_sms = on_sms ? smallest_kind(available, left) : 0;
    }
    // With groups a few workers that only send take up to four times as long as those that compute.
    const bool has_senders =
        on_sms && schedule_.combine.transport == CombineTransport::kStaged && context_.combine_groups == 0;
    if (is_open(kCommCombineSms) && has_senders) {
      const int64_t left = available - comm.reduce_sms - comm.relay_sms - std::max(1, comm.dispatch_sms);
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

  // Values of its own that a stage may get: beside those that were given, the smallest last; those that another stage
  // of the same kernel or call was given; and fc1's columns, since tile.n may have values that fc1 may not.
  std::vector<Choice> own_choices(GemmStage stage) const {
    const bool has_own = has_own_tile(stage);
    std::vector<Choice> choices;
    const auto add = [&](FieldId field, const std::vector<std::optional<int>>& values) {
      if (!values.empty()) choices.push_back({stage_field(stage, field), {std::nullopt}});
      for (const std::optional<int> value : values) choices.back().values.push_back(value);
    };
    const auto add_shared = [&](FieldId field, bool applies, std::vector<std::optional<int>> values) {
      if (!applies) values.clear();
      for (const std::optional<int> value : own_values(field)) values.push_back(value);
      add(field, values);
    };
    if (has_own && (stage == GemmStage::kWgradFc2 || stage == GemmStage::kWgradFc1)) add(kTileM, {128});
    if (is_backward_on_cuda() && stage == GemmStage::kDgradFc2) {
      add(kTileStages, {4, 3, 2});
      add(kTileN, {192, 128});
      if (is_open(kTileN)) choices.back().values.erase(choices.back().values.begin());
    } else if (is_backward_on_cuda()) {
      const bool common = is_open(kTileN) || schedule_.tile.n == 128 || schedule_.tile.n == 256;
      add_shared(kTileN, has_own || !common, {256, 128});
      add_shared(kTileStages, has_own, {3, 2});
    } else {
      add_shared(kTileN, has_own || stage == GemmStage::kFc1, {128});
      add_shared(kTileStages, has_own, {3, 2});
    }
    if (has_own) add(kTilePipeline, {0});
    if (has_own) add(kTileK, {64});
    if (has_own && own_values(kTileCluster).empty()) add(kTileCluster, {1});
    return open_choices(choices);
  }

  // Whether a stage's own value of a tile field may bind others, of its kernel or call.
  bool binds_others(GemmStage stage, FieldId field) const {
    if (!is_backward_on_cuda() || field == kTileCluster) return context_.cuda;
    const bool is_dgrad = stage == GemmStage::kDgradFc2 || stage == GemmStage::kDgradFc1;
    if (is_dgrad && field == kTileStages && schedule_.fusion == Fusion::kLayer) return true;
    return schedule_.wgrad != WgradOrder::kAfter && stage != GemmStage::kDgradFc2;
  }

  // Values of a tile field that stages were given as their own, which the stages of one kernel or call may have to
  // share.
  std::vector<std::optional<int>> own_values(FieldId field) const {
    std::vector<std::optional<int>> values;
    for (const GemmStage stage : stages_of(context_.direction)) {
      const FieldId own = stage_field(stage, field);
      if (binds_others(stage, field) && !is_open(own)) values.push_back(descriptor_of(own).get(schedule_));
    }
    return values;
  }

  // For the common tile: first what stages were given.
  Choice common_choice(FieldId field, const std::vector<std::optional<int>>& preferred) const {
    Choice choice{field, own_values(field)};
    choice.values.insert(choice.values.end(), preferred.begin(), preferred.end());
    return choice;
  }

  // Where the common cluster is given, and one stage's is another, the other stages need that, too.
  void share_cluster() {
    const std::vector<std::optional<int>> given = own_values(kTileCluster);
    if (given.empty() || is_open(kTileCluster) || given.front() == schedule_.tile.cluster) return;
    for (const GemmStage stage : stages_of(context_.direction)) {
      const FieldId own = stage_field(stage, kTileCluster);
      if (is_open(own)) descriptor_of(own).set(schedule_, given.front());
    }
  }

  // The row block first, then the rest of the common tile, then the ring, which takes what the pipeline leaves, then
  // what single stages need. Values in a list get smaller: where the last one does not fit, no other does.
  int complete_tiles() {
    share_cluster();
    const TileShape tile = schedule_.tile;
    Choice rows{kTileM, {}};
    for (const GemmStage stage : {GemmStage::kFc1, GemmStage::kFc2, GemmStage::kDgradFc2, GemmStage::kDgradFc1}) {
      const std::optional<int> own = schedule_.stage_tile[static_cast<int>(stage)].m;
      if (own && !context_.cuda) rows.values.emplace_back(*own);
    }
    rows.values.emplace_back(tile.m);
    const std::vector<Choice> choices = open_choices({rows,
                                                      common_choice(kTileN, {tile.n, 128}),
                                                      {kTilePipeline, {0}},
                                                      {kTileK, {tile.k}},
                                                      common_choice(kTileStages, {tile.stages, 3, 2}),
                                                      common_choice(kTileCluster, {tile.cluster, 1}),
                                                      {kCommChunkBytes, {4096, 2048, 1024, 512}},
                                                      {kCommStages, {4, 3, 2, 1}}});
    struct Stage {
      std::vector<Choice> choices;
      std::vector<const Rule*> rules;
    };
    std::vector<Stage> stages;
    FieldMask all_stages = 0;
    for (const GemmStage stage : stages_of(context_.direction)) {
      stages.push_back({own_choices(stage), rules_reading(stage_mask(stage))});
      all_stages |= stage_mask(stage);
    }
    if (is_backward_on_cuda()) {  // what stages have in common, the later ones take from the earlier ones
      FieldMask later = 0;
      for (std::size_t i = stages.size(); i-- > 0;) {
        std::erase_if(stages[i].rules, [later](const Rule* rule) { return (rule->reads & later) != 0; });
        later |= stage_mask(stages_of(context_.direction)[i]) & ~given_;
      }
    }
    const std::vector<const Rule*> tile_rules = rules_reading(all_stages);

    const FewestViolations::Count count = [&](Schedule& tried) {
      for (const Stage& stage : stages) {
        const FewestViolations::Count count_stage = [&](Schedule& own) { return violated(stage.rules, own); };
        if (!stage.choices.empty()) FewestViolations(stage.choices, count_stage).search(tried);
      }
      return violated(tile_rules, tried);
    };
    return FewestViolations(choices, count).search(schedule_);
  }

  RuleContext context_;
  DefaultOrder order_;
  std::vector<Rule> rules_;
  Schedule schedule_;
  FieldMask given_ = 0;
  WgradOrder open_wgrad_ = WgradOrder::kFill;  // what an open field becomes where it can
};

}  // namespace

Schedule fill(const PartialSchedule& given, const ScheduleRequest& request) {
  const Direction ordered = request.operation == Operation::kLayer ? request.direction : Direction::kForward;
  return Filler(given, rule_context(request), default_order(request.shape, request.machine, ordered)).fill();
}

}  // namespace uniep
