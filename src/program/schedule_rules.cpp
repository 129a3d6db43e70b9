#include "program/schedule_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace uniep {
namespace {

constexpr int64_t kMostRanks = 64;
constexpr int64_t kMostRingBytes = 64LL * 1024;  // cuda: a copy's ring
constexpr int64_t kEpilogueBytes = 8LL * 1024;   // cuda: staging, barriers and task records
constexpr int64_t kElementBytes = 2;             // bf16
constexpr int64_t kWarpgroupTile = 128LL * 128;  // fp32 accumulators that one math warpgroup holds
constexpr int64_t kCooperativeTile = 2 * kWarpgroupTile;

template <typename... Fields>
constexpr FieldMask reads(Fields... fields) {
  return (field_bit(fields) | ...);
}

std::string given(const Schedule& schedule, FieldId field) {
  return name_of(field) + "=" + value_text(descriptor_of(field).field, descriptor_of(field).get(schedule).value());
}

// The field that decides a stage's tile value: the stage's own where it is given, else the common one.
FieldId origin(const Schedule& schedule, GemmStage stage, FieldId tile_field) {
  const FieldId own = stage_field(stage, tile_field);
  return descriptor_of(own).get(schedule) ? own : tile_field;
}
std::string given(const Schedule& schedule, GemmStage stage, FieldId tile_field) {
  return given(schedule, origin(schedule, stage, tile_field));
}

// Workers that take part; at least one, so that comm.reserve_sms is blamed for itself only.
int64_t available(const Schedule& schedule, const RuleContext& context) {
  return std::max<int64_t>(1, context.workers - schedule.comm.reserve_sms);
}

int64_t ring_bytes(const Schedule& schedule) {
  return static_cast<int64_t>(schedule.comm.chunk_bytes) * schedule.comm.stages;
}

int64_t copy_bytes(const Schedule& schedule) {
  return schedule.comm.where == CommWhere::kWarps ? ring_bytes(schedule) : 0;
}

int64_t operand_bytes(const TileShape& tile) {
  return static_cast<int64_t>(tile.stages) * (static_cast<int64_t>(tile.m) + tile.n) * tile.k * kElementBytes;
}

bool on_sms(const Schedule& schedule) {
  return schedule.comm.where == CommWhere::kSms;
}

void add_worker_rules(std::vector<Rule>& rules) {
  rules.push_back({reads(kCommReserveSms),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return s.comm.reserve_sms <= std::max<int64_t>(c.workers, 1) - 1;
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return fmt::format("{}: legal are 0 to {}, one of {} workers must remain",
                                        given(s, kCommReserveSms), std::max<int64_t>(c.workers, 1) - 1, c.workers);
                   }});
  rules.push_back({reads(kCommWhere, kCommDispatchSms),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return on_sms(s) ? s.comm.dispatch_sms >= 1 : s.comm.dispatch_sms == 0;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return fmt::format("{}: comm.where={}", given(s, kCommDispatchSms),
                                        on_sms(s) ? "sms needs at least 1 copying worker"
                                                  : "warps needs 0, every worker has a copy agent");
                   }});
  rules.push_back(
      {reads(kCommWhere, kCommCombineSms),
       {},
       [](const Schedule& s, const RuleContext&, GemmStage) { return on_sms(s) || s.comm.combine_sms == 0; },
       [](const Schedule& s, const RuleContext&, GemmStage) {
         return given(s, kCommCombineSms) + ": comm.where=warps needs 0, every worker has a copy agent";
       }});
  rules.push_back({reads(kCommWhere, kCommReduceSms),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) { return on_sms(s) || s.comm.reduce_sms == 0; },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kCommReduceSms) + ": comm.where=warps needs 0, every worker has a copy agent";
                   }});
  rules.push_back({reads(kCommWhere, kCommCombineSms, kCommReduceSms, kCommReserveSms),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return !on_sms(s) || s.comm.combine_sms + s.comm.reduce_sms <= available(s, c) - 1;
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     const bool combine_leads = s.comm.combine_sms >= s.comm.reduce_sms;
                     return fmt::format(
                         "{} with {}: together at most {}, one of {} available workers (workers - comm.reserve_sms) "
                         "must compute",
                         given(s, combine_leads ? kCommCombineSms : kCommReduceSms),
                         given(s, combine_leads ? kCommReduceSms : kCommCombineSms), available(s, c) - 1,
                         available(s, c));
                   }});
  rules.push_back(
      {reads(kCommWhere, kCommDispatchSms, kCommCombineSms, kCommReduceSms, kCommReserveSms),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return !on_sms(s) || s.comm.dispatch_sms <= available(s, c) - s.comm.combine_sms - s.comm.reduce_sms;
       },
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return fmt::format(
             "{}: with {} and {} at most {} of {} available workers (workers - comm.reserve_sms) are left",
             given(s, kCommDispatchSms), given(s, kCommCombineSms), given(s, kCommReduceSms),
             std::max<int64_t>(0, available(s, c) - s.comm.combine_sms - s.comm.reduce_sms), available(s, c));
       }});
}

void add_combine_rules(std::vector<Rule>& rules) {
  rules.push_back({reads(kCombineTransport, kCommCombineSms),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.combine.transport == CombineTransport::kStaged || s.comm.combine_sms == 0;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kCommCombineSms) +
                            ": combine.transport=epilogue needs 0, no copying worker has anything to send";
                   }});
  rules.push_back({reads(kCombineTransport),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return c.combine_groups <= 0 || s.combine.transport == CombineTransport::kStaged;
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return fmt::format(
                         "{}: combine_groups={} needs staged, rows are summed in a group before they leave",
                         given(s, kCombineTransport), c.combine_groups);
                   }});
}

void add_order_rules(std::vector<Rule>& rules, const RuleContext& context) {
  rules.push_back(
      {reads(kOrderExpertsPerWave),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) { return s.order.experts_per_wave <= c.local_experts; },
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return fmt::format("{}: legal are 1 to {}, the local experts of a rank", given(s, kOrderExpertsPerWave),
                            c.local_experts);
       }});
  rules.push_back({reads(kOrderInterleave, kFusion),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.order.interleave == Interleave::kPhased || s.fusion == Fusion::kLayer;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kOrderInterleave) + ": needs fusion=layer, both GEMMs in one launch; fusion is " +
                            value_text(descriptor_of(kFusion).field, static_cast<int>(s.fusion));
                   }});
  if (context.direction == Direction::kForward) return;
  rules.push_back({reads(kBackwardWgrad, kFusion),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.wgrad == WgradOrder::kAfter || s.fusion != Fusion::kNone;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kBackwardWgrad) + ": needs fusion=pairs or fusion=layer; fusion is none";
                   }});
}

void add_tile_rules(std::vector<Rule>& rules, const RuleContext& context) {
  for (const GemmStage stage : {GemmStage::kFc1, GemmStage::kFc2, GemmStage::kDgradFc2, GemmStage::kDgradFc1}) {
    rules.push_back({reads(kTileM, stage_field(stage, kTileM)), stage,
                     [](const Schedule& s, const RuleContext&, GemmStage of) { return s.tile_of(of).m == s.tile.m; },
                     [](const Schedule& s, const RuleContext&, GemmStage of) {
                       return fmt::format("{}: must equal tile.m, which is {}, row blocks are the unit of the counters",
                                          given(s, of, kTileM), s.tile.m);
                     }});
  }
  if (context.direction == Direction::kBackward) return;
  rules.push_back({reads(kTileN, stage_field(GemmStage::kFc1, kTileN)), GemmStage::kFc1,
                   [](const Schedule& s, const RuleContext&, GemmStage of) {
                     return is_legal_value(descriptor_of(stage_field(of, kTileN)).field, s.tile_of(of).n);
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage of) {
                     return given(s, of, kTileN) +
                            ": fc1 needs 128 or 256, gate and up columns are half each; give tile.fc1.n";
                   }});
}

void add_cuda_rules(std::vector<Rule>& rules, const RuleContext& context) {
  rules.push_back({reads(kCommChunkBytes, kCommStages),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) { return ring_bytes(s) <= kMostRingBytes; },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return fmt::format("{} with {}: the ring takes {} bytes, at most {} on cuda",
                                        given(s, kCommChunkBytes), given(s, kCommStages), ring_bytes(s),
                                        kMostRingBytes);
                   }});
  for (const GemmStage stage : stages_of(context.direction)) {
    const FieldMask tile_sizes = (tile_mask() | stage_mask(stage)) & ~reads(kTileCluster, kTilePipeline) &
                                 ~reads(stage_field(stage, kTileCluster), stage_field(stage, kTilePipeline));
    rules.push_back({reads(kTileM, kTileN, kTilePipeline, stage_field(stage, kTileM), stage_field(stage, kTileN),
                           stage_field(stage, kTilePipeline)),
                     stage,
                     [](const Schedule& s, const RuleContext&, GemmStage of) {
                       const TileShape tile = s.tile_of(of);
                       const bool pingpong = tile.pipeline == Pipeline::kPingpong;
                       const int64_t accumulators = static_cast<int64_t>(tile.m) * tile.n;
                       if (pingpong) return tile.m <= 128 && accumulators <= kWarpgroupTile;
                       return tile.m >= 128 && accumulators <= kCooperativeTile;
                     },
                     [](const Schedule& s, const RuleContext&, GemmStage of) {
                       const bool pingpong = s.tile_of(of).pipeline == Pipeline::kPingpong;
                       return fmt::format("{} with {} and {}: cuda needs m of {} and m * n of at most {}",
                                          given(s, of, kTileM), given(s, of, kTileN), given(s, of, kTilePipeline),
                                          pingpong ? "64 or 128" : "128 or 256",
                                          pingpong ? kWarpgroupTile : kCooperativeTile);
                     }});
    rules.push_back({tile_sizes | reads(kCommWhere, kCommChunkBytes, kCommStages), stage,
                     [](const Schedule& s, const RuleContext& c, GemmStage of) {
                       return operand_bytes(s.tile_of(of)) + copy_bytes(s) + kEpilogueBytes <= c.shared_memory_bytes;
                     },
                     [](const Schedule& s, const RuleContext& c, GemmStage of) {
                       const int64_t operands = operand_bytes(s.tile_of(of));
                       return fmt::format(
                           "{} with {}, {}, {}: operands {} + copy ring {} (comm.chunk_bytes * comm.stages, "
                           "comm.where=warps only) + epilogue {} = {} bytes, the machine has shared_memory_bytes={}",
                           given(s, of, kTileStages), given(s, of, kTileM), given(s, of, kTileN), given(s, of, kTileK),
                           operands, copy_bytes(s), kEpilogueBytes, operands + copy_bytes(s) + kEpilogueBytes,
                           c.shared_memory_bytes);
                     }});
    rules.push_back({reads(kTileCluster, stage_field(stage, kTileCluster), kCommReserveSms, kCommDispatchSms,
                           kCommCombineSms, kCommReduceSms),
                     stage,
                     [](const Schedule& s, const RuleContext& c, GemmStage of) {
                       const int cluster = s.tile_of(of).cluster;
                       const CommSchedule& comm = s.comm;
                       return available(s, c) % cluster == 0 && comm.dispatch_sms % cluster == 0 &&
                              comm.combine_sms % cluster == 0 && comm.reduce_sms % cluster == 0;
                     },
                     [](const Schedule& s, const RuleContext& c, GemmStage of) {
                       return fmt::format(
                           "{}: must divide the {} available workers (workers - comm.reserve_sms), {}, {} and {}",
                           given(s, of, kTileCluster), available(s, c), given(s, kCommDispatchSms),
                           given(s, kCommCombineSms), given(s, kCommReduceSms));
                     }});
  }
}

}  // namespace

RuleContext rule_context(Direction direction, const LayerShape& shape, const Numerics& numerics,
                         const Machine& machine) {
  RuleContext context;
  context.direction = direction;
  context.cuda = machine.engine == EngineKind::kCuda;
  const bool divides = shape.experts >= 1 && machine.ranks >= 1 && shape.experts % machine.ranks == 0;
  // An illegal shape is reported for itself; it bounds no wave.
  context.local_experts = divides ? shape.experts / machine.ranks : std::numeric_limits<int64_t>::max();
  context.combine_groups = numerics.combine_groups;
  context.workers = machine.workers;
  context.shared_memory_bytes = machine.shared_memory_bytes;
  return context;
}

std::vector<Rule> schedule_rules(const RuleContext& context) {
  std::vector<Rule> rules;
  add_worker_rules(rules);
  add_combine_rules(rules);
  add_order_rules(rules, context);
  add_tile_rules(rules, context);
  if (context.cuda) add_cuda_rules(rules, context);
  return rules;
}

std::vector<std::string> shape_violations(const LayerShape& shape, const Numerics& numerics, const Machine& machine) {
  std::vector<std::string> violations;
  const auto require = [&](bool holds, const char* name, int64_t value, const std::string& legal) {
    if (!holds) violations.push_back(fmt::format("{}={}: {}", name, value, legal));
  };
  const auto is_positive_multiple = [](int64_t value, int64_t of) { return value > 0 && value % of == 0; };
  const bool ranks_legal = machine.ranks >= 1 && machine.ranks <= kMostRanks;
  const int64_t groups = numerics.combine_groups;
  require(is_positive_multiple(shape.hidden, 8), "hidden", shape.hidden, "legal are positive multiples of 8");
  require(is_positive_multiple(shape.intermediate, 8), "intermediate", shape.intermediate,
          "legal are positive multiples of 8");
  require(shape.experts >= 1, "experts", shape.experts, "legal are 1 or more");
  require(shape.topk >= 1 && shape.topk <= std::max<int64_t>(shape.experts, 1), "topk", shape.topk,
          fmt::format("legal are 1 to the number of experts, {}", shape.experts));
  require(ranks_legal, "ranks", machine.ranks, fmt::format("legal are 1 to {}", kMostRanks));
  require(machine.workers >= 1, "workers", machine.workers, "legal are 1 or more");
  if (ranks_legal && shape.experts >= 1) {
    require(shape.experts % machine.ranks == 0, "experts", shape.experts,
            fmt::format("must be a multiple of the number of ranks, {}", machine.ranks));
  }
  require(numerics.activation == Activation::kSwiglu, "activation", static_cast<int>(numerics.activation),
          "not built; legal is swiglu (0)");
  require(numerics.router_weight == RouterWeight::kActivation, "router_weight",
          static_cast<int>(numerics.router_weight), "not built; legal is activation (0)");
  const int weight_gradient = static_cast<int>(numerics.weight_gradient);
  require(weight_gradient >= 0 && weight_gradient <= static_cast<int>(WeightGradient::kMainGrad), "weight_gradient",
          weight_gradient, "legal are bf16 (0), fp32 (1) and main_grad (2)");
  require(groups >= 0, "combine_groups", groups, "legal are 0 (one flat sum) or a number of equal expert groups");
  if (groups > 0 && shape.experts >= 1) {
    require(shape.experts % groups == 0, "combine_groups", groups,
            fmt::format("must divide the number of experts, {}", shape.experts));
  }
  if (groups > 0 && ranks_legal) {
    require(groups % machine.ranks == 0, "combine_groups", groups,
            fmt::format("must be a multiple of the number of ranks, {}", machine.ranks));
  }
  return violations;
}

}  // namespace uniep
