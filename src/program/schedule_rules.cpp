#include "program/schedule_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "model/activation_choice.h"
#include "program/kernel_memory.h"

namespace uniep {
namespace {

constexpr int64_t kMaxRanks = 64;

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

// Workers that take part from begin to end; at least one, so that comm.reserve_sms is blamed for itself only.
int64_t available(const Schedule& schedule, const RuleContext& context) {
  return std::max<int64_t>(1, context.workers - schedule.comm.reserve_sms);
}

bool is_wgrad(GemmStage stage) {
  return stage == GemmStage::kWgradFc2 || stage == GemmStage::kWgradFc1;
}

// Whether a stage runs in launches that only multiply, without a copying warp's ring.
bool is_standalone(const Schedule& schedule, GemmStage stage) {
  return is_wgrad(stage) && schedule.wgrad == WgradOrder::kAfter;
}

// Shared memory of the kernel that runs a GEMM stage.
int64_t kernel_bytes(const Schedule& schedule, GemmStage stage) {
  const TileShape tile = schedule.tile_of(stage);
  if (is_standalone(schedule, stage)) return cuda::standalone_kernel_bytes(tile.n, tile.stages);
  if (stage == GemmStage::kDgradFc2) {
    return cuda::gradient_kernel_bytes(tile.n, tile.stages, schedule.comm.chunk_bytes, schedule.comm.stages);
  }
  return cuda::layer_kernel_bytes(tile.n, tile.stages, schedule.comm.chunk_bytes, schedule.comm.stages);
}

int64_t exchange_bytes(const Schedule& schedule, const RuleContext& context) {
  const int warps = context.operation == Operation::kDispatch ? cuda::kExchangeWarps : cuda::kMinCombineWarps;
  return cuda::exchange_kernel_bytes(warps, schedule.comm.chunk_bytes, schedule.comm.stages);
}

// A tile field as each of the direction's stages has it, without repetition.
std::string given_by_stages(const Schedule& schedule, const RuleContext& context, FieldId tile_field) {
  std::string text;
  for (const GemmStage stage : stages_of(context.direction)) {
    const std::string one = given(schedule, stage, tile_field);
    if (text.find(one) == std::string::npos) text += (text.empty() ? "" : " with ") + one;
  }
  return text;
}

FieldMask reads_of_stages(const RuleContext& context, FieldId tile_field) {
  FieldMask mask = reads(tile_field);
  for (const GemmStage stage : stages_of(context.direction)) mask |= reads(stage_field(stage, tile_field));
  return mask;
}

bool on_sms(const Schedule& schedule) {
  return schedule.comm.where == CommWhere::kSms;
}

void add_reserve_rule(std::vector<Rule>& rules) {
  rules.push_back({reads(kCommReserveSms),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return s.comm.reserve_sms <= std::max<int64_t>(c.workers, 1) - 1;
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return fmt::format("{}: legal are 0 to {}, one of {} workers must remain",
                                        given(s, kCommReserveSms), std::max<int64_t>(c.workers, 1) - 1, c.workers);
                   }});
}

// Lent workers may be away: all that they do is dealt by tickets, and waits for no peer.
void add_lend_rule(std::vector<Rule>& rules) {
  rules.push_back({reads(kCommLendSms, kQueue, kCommWhere, kDispatchTransport),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     const bool by_tickets = s.queue == QueueKind::kDynamic && !on_sms(s);
                     return !s.comm.lend_sms || (by_tickets && s.dispatch.transport == DispatchTransport::kPull);
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return fmt::format("{}: needs queue=dynamic, comm.where=warps and dispatch.transport=pull",
                                        given(s, kCommLendSms));
                   }});
}

void add_worker_rules(std::vector<Rule>& rules) {
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

void add_wave_rule(std::vector<Rule>& rules) {
  rules.push_back(
      {reads(kOrderExpertsPerWave),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) { return s.order.experts_per_wave <= c.local_experts; },
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return fmt::format("{}: legal are 1 to {}, the local experts of a rank", given(s, kOrderExpertsPerWave),
                            c.local_experts);
       }});
}

void add_order_rules(std::vector<Rule>& rules, const RuleContext& context) {
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
                     return s.wgrad != WgradOrder::kFill || s.fusion != Fusion::kNone;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kBackwardWgrad) + ": needs fusion=pairs or fusion=layer; fusion is none";
                   }});
  rules.push_back({reads(kBackwardWgradReserve, kBackwardWgrad),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.wgrad == WgradOrder::kMixed || s.wgrad_reserve == Schedule{}.wgrad_reserve;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return fmt::format("{}: needs backward.wgrad=mixed, else legal is {}; {}",
                                        given(s, kBackwardWgradReserve), Schedule{}.wgrad_reserve,
                                        given(s, kBackwardWgrad));
                   }});
  rules.push_back({reads(kBackwardWgrad, kFusion, kOrderInterleave, kQueue),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.wgrad != WgradOrder::kMixed ||
                            (s.fusion == Fusion::kLayer && s.order.interleave == Interleave::kPhased &&
                             s.queue == QueueKind::kDynamic);
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return fmt::format(
                         "{}: needs fusion=layer, order.interleave=phased and queue=dynamic, a queue for each of the "
                         "dgrads and one for the weight gradients; given are {}, {} and {}",
                         given(s, kBackwardWgrad), given(s, kFusion), given(s, kOrderInterleave), given(s, kQueue));
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

// The values of a stage's tile field that kernels of the cuda engine are built for; elsewhere all that the field has.
bool is_built(FieldId tile_field, GemmStage stage, int value) {
  switch (tile_field) {
    case kTileM:
      return value == cuda::kTileM;
    case kTileK:
      return value == cuda::kTileK;
    case kTileN:
      return value == 128 || value == (stage == GemmStage::kDgradFc2 ? 192 : 256);
    case kTilePipeline:
      return value == static_cast<int>(Pipeline::kCooperative);
    default:
      return true;
  }
}

template <FieldId kField>
int tile_value(const Schedule& schedule, GemmStage stage) {
  return descriptor_of(origin(schedule, stage, kField)).get(schedule).value();
}

template <FieldId kField>
void add_built_rule(std::vector<Rule>& rules, GemmStage stage) {
  rules.push_back({reads(kField, stage_field(stage, kField)), stage,
                   [](const Schedule& s, const RuleContext&, GemmStage of) {
                     return is_built(kField, of, tile_value<kField>(s, of));
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage of) {
                     const ScheduleField& field = descriptor_of(kField).field;
                     std::string built;
                     for (const int value : legal_values(field)) {
                       if (is_built(kField, of, value))
                         built += (built.empty() ? "" : " or ") + value_text(field, value);
                     }
                     return fmt::format("{}: not built on cuda; legal is {}", given(s, of, kField), built);
                   }});
}

// A value that all stages of a direction, or of its one launch, have in common.
template <FieldId kField>
bool is_common(const Schedule& schedule, const RuleContext& context) {
  const std::vector<GemmStage> stages = stages_of(context.direction);
  return std::all_of(stages.begin(), stages.end(), [&](GemmStage stage) {
    return tile_value<kField>(schedule, stage) == tile_value<kField>(schedule, stages.front());
  });
}

template <FieldId kField>
void add_one_kernel_rule(std::vector<Rule>& rules, const RuleContext& context) {
  rules.push_back({reads_of_stages(context, kField) | reads(kFusion),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return s.fusion != Fusion::kLayer || is_common<kField>(s, c);
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return given_by_stages(s, c, kField) +
                            ": fusion=layer runs fc1 and fc2 in one kernel, with equal tiles on cuda";
                   }});
}

void add_cluster_rules(std::vector<Rule>& rules, const RuleContext& context) {
  rules.push_back({reads_of_stages(context, kTileCluster),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) { return is_common<kTileCluster>(s, c); },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return given_by_stages(s, c, kTileCluster) +
                            ": a call has the same clusters in all its stages on cuda";
                   }});
  rules.push_back(
      {reads_of_stages(context, kTileCluster) |
           reads(kCommReserveSms, kCommLendSms, kCommDispatchSms, kCommCombineSms, kCommReduceSms),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         const CommSchedule& comm = s.comm;
         const bool even = available(s, c) % 2 == 0 && (!comm.lend_sms || c.workers % 2 == 0) &&
                           comm.dispatch_sms % 2 == 0 && comm.combine_sms % 2 == 0 && comm.reduce_sms % 2 == 0;
         return even || tile_value<kTileCluster>(s, stages_of(c.direction).front()) == 1;
       },
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return fmt::format("{}: must divide the {} available workers (workers - comm.reserve_sms{}), {}, {} and {}",
                            given_by_stages(s, c, kTileCluster), available(s, c),
                            s.comm.lend_sms ? fmt::format("; lent: all {}, too", c.workers) : "",
                            given(s, kCommDispatchSms), given(s, kCommCombineSms), given(s, kCommReduceSms));
       }});
}

void add_memory_rule(std::vector<Rule>& rules, GemmStage stage) {
  const FieldMask wgrad = is_wgrad(stage) ? reads(kBackwardWgrad) : 0;
  rules.push_back({wgrad | reads(kTileN, kTileStages, stage_field(stage, kTileN), stage_field(stage, kTileStages),
                                 kCommChunkBytes, kCommStages),
                   stage,
                   [](const Schedule& s, const RuleContext& c, GemmStage of) {
                     return kernel_bytes(s, of) <= c.shared_memory_bytes;
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage of) {
                     const std::string ring = is_standalone(s, of)
                                                  ? given(s, of, kTileN)
                                                  : fmt::format("{}, {} and {}", given(s, of, kTileN),
                                                                given(s, kCommChunkBytes), given(s, kCommStages));
                     return fmt::format("{} with {}: the kernel takes {} bytes, the machine has shared_memory_bytes={}",
                                        given(s, of, kTileStages), ring, kernel_bytes(s, of), c.shared_memory_bytes);
                   }});
}

// Weight gradients that fill share the kernel of dgrad FC1.
template <FieldId kField>
void add_fill_rule(std::vector<Rule>& rules, GemmStage wgrad) {
  rules.push_back(
      {reads(kBackwardWgrad, kField, stage_field(GemmStage::kDgradFc1, kField), stage_field(wgrad, kField)), wgrad,
       [](const Schedule& s, const RuleContext&, GemmStage of) {
         return s.wgrad == WgradOrder::kAfter ||
                tile_value<kField>(s, of) == tile_value<kField>(s, GemmStage::kDgradFc1);
       },
       [](const Schedule& s, const RuleContext&, GemmStage of) {
         return fmt::format(
             "{} with {}: {} runs dgrad_fc1 and {} in one kernel, with equal tiles on "
             "cuda",
             given(s, of, kField), given(s, GemmStage::kDgradFc1, kField), given(s, kBackwardWgrad), stage_label(of));
       }});
}

// All of backward in one kernel, which goes once from dgrad FC2 to dgrad FC1.
void add_cuda_backward_layer_rules(std::vector<Rule>& rules) {
  constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();
  rules.push_back({reads(kFusion, kOrderExpertsPerWave),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return s.fusion != Fusion::kLayer || c.local_experts == kNoBound ||
                            s.order.experts_per_wave >= c.local_experts;
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return fmt::format(
                         "{}: in backward fusion=layer has one wave on cuda; legal is {}, the local experts of a rank",
                         given(s, kOrderExpertsPerWave), c.local_experts);
                   }});
  rules.push_back({reads(kFusion, kOrderInterleave),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.fusion != Fusion::kLayer || s.order.interleave == Interleave::kPhased;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kOrderInterleave) + ": in backward not built on cuda yet; legal is phased";
                   }});
  rules.push_back(
      {reads(kFusion),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) { return s.fusion != Fusion::kLayer || !c.weighs_bias; },
       [](const Schedule& s, const RuleContext&, GemmStage) {
         return given(s, kFusion) +
                ": in backward not built on cuda with bias=1 and router_weight=output; legal are none, "
                "pairs";
       }});
  const GemmStage second = GemmStage::kDgradFc1;
  rules.push_back(
      {reads(kFusion, kTileStages, stage_field(GemmStage::kDgradFc2, kTileStages), stage_field(second, kTileStages)),
       second,
       [](const Schedule& s, const RuleContext&, GemmStage of) {
         return s.fusion != Fusion::kLayer || s.tile_of(of).stages == s.tile_of(GemmStage::kDgradFc2).stages;
       },
       [](const Schedule& s, const RuleContext&, GemmStage of) {
         return fmt::format(
             "{} with {}: fusion=layer runs dgrad_fc2 and dgrad_fc1 in one kernel, with equal stages on "
             "cuda",
             given(s, of, kTileStages), given(s, GemmStage::kDgradFc2, kTileStages));
       }});
}

void add_cuda_backward_rules(std::vector<Rule>& rules) {
  add_cuda_backward_layer_rules(rules);
  rules.push_back({reads(kDispatchTransport),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.dispatch.transport == DispatchTransport::kPull;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kDispatchTransport) + ": in backward not built on cuda yet; legal is pull";
                   }});
  const GemmStage gradient = GemmStage::kDgradFc2;
  rules.push_back(
      {reads(kTileN, kTileStages, stage_field(gradient, kTileN), stage_field(gradient, kTileStages)), gradient,
       [](const Schedule& s, const RuleContext&, GemmStage of) { return s.tile_of(of).stages >= s.tile_of(of).n / 64; },
       [](const Schedule& s, const RuleContext&, GemmStage of) {
         return fmt::format("{} with {}: dgrad_fc2 needs a stage for every 64 columns, {} at least",
                            given(s, of, kTileStages), given(s, of, kTileN), s.tile_of(of).n / 64);
       }});
  for (const GemmStage wgrad : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
    add_fill_rule<kTileN>(rules, wgrad);
    add_fill_rule<kTileStages>(rules, wgrad);
  }
}

void add_cuda_rules(std::vector<Rule>& rules, const RuleContext& context) {
  for (const GemmStage stage : stages_of(context.direction)) {
    add_built_rule<kTileM>(rules, stage);
    add_built_rule<kTileN>(rules, stage);
    add_built_rule<kTileK>(rules, stage);
    add_built_rule<kTilePipeline>(rules, stage);
    add_memory_rule(rules, stage);
  }
  add_cluster_rules(rules, context);
  if (context.direction == Direction::kBackward) {
    add_cuda_backward_rules(rules);
    return;
  }
  add_one_kernel_rule<kTileN>(rules, context);
  add_one_kernel_rule<kTileStages>(rules, context);
}

// Dispatch and combine alone heed the SMs that they take, and on cuda the row block and the rings of their warps.
template <FieldId kSms>
void add_sms_rule(std::vector<Rule>& rules) {
  rules.push_back({reads(kSms, kCommReserveSms),
                   {},
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return descriptor_of(kSms).get(s).value() <= available(s, c);
                   },
                   [](const Schedule& s, const RuleContext& c, GemmStage) {
                     return fmt::format(
                         "{}: legal are 0 (all) to {}, the available workers (workers - comm.reserve_sms)",
                         given(s, kSms), available(s, c));
                   }});
}

void add_exchange_rules(std::vector<Rule>& rules, const RuleContext& context) {
  if (context.operation == Operation::kDispatch) {
    add_sms_rule<kCommDispatchSms>(rules);
  } else {
    add_sms_rule<kCommCombineSms>(rules);
  }
}

void add_cuda_exchange_rules(std::vector<Rule>& rules) {
  rules.push_back({reads(kTileM),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) { return s.tile.m == cuda::kTileM; },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return fmt::format("{}: not built on cuda; legal is {}", given(s, kTileM), cuda::kTileM);
                   }});
  rules.push_back(
      {reads(kCommChunkBytes, kCommStages),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) { return exchange_bytes(s, c) <= c.shared_memory_bytes; },
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return fmt::format("{} with {}: the rings of {} warps take {} bytes, the machine has shared_memory_bytes={}",
                            given(s, kCommChunkBytes), given(s, kCommStages),
                            c.operation == Operation::kDispatch ? cuda::kExchangeWarps : cuda::kMinCombineWarps,
                            exchange_bytes(s, c), c.shared_memory_bytes);
       }});
}

}  // namespace

RuleContext rule_context(const ScheduleRequest& request) {
  const LayerShape& shape = request.shape;
  const Machine& machine = request.machine;
  RuleContext context;
  context.direction = request.direction;
  context.operation = request.operation;
  context.cuda = machine.engine == EngineKind::kCuda;
  const bool divides = shape.experts >= 1 && machine.ranks >= 1 && shape.experts % machine.ranks == 0;
  // An illegal shape is reported for itself; it bounds no wave.
  context.hidden = shape.hidden;
  context.topk = shape.topk;
  context.ranks = machine.ranks;
  context.local_experts = divides ? shape.experts / machine.ranks : std::numeric_limits<int64_t>::max();
  context.combine_groups = request.numerics.combine_groups;
  context.weighs_bias = request.numerics.bias && request.numerics.router_weight == RouterWeight::kOutput;
  context.workers = machine.workers;
  context.shared_memory_bytes = machine.shared_memory_bytes;
  return context;
}

std::vector<Rule> kernel_rules(const RuleContext& context) {
  std::vector<Rule> rules;
  if (!context.cuda) return rules;
  if (context.operation == Operation::kLayer) {
    add_cuda_rules(rules, context);
  } else {
    add_cuda_exchange_rules(rules);
  }
  return rules;
}

std::vector<Rule> schedule_rules(const RuleContext& context) {
  std::vector<Rule> rules;
  add_reserve_rule(rules);
  add_wave_rule(rules);
  if (context.operation == Operation::kLayer) {
    add_lend_rule(rules);
    add_worker_rules(rules);
    add_combine_rules(rules);
    add_order_rules(rules, context);
    add_tile_rules(rules, context);
  } else {
    add_exchange_rules(rules, context);
  }
  for (const Rule& rule : kernel_rules(context)) rules.push_back(rule);
  return rules;
}

std::vector<std::string> shape_violations(const ScheduleRequest& request) {
  const LayerShape& shape = request.shape;
  const Numerics& numerics = request.numerics;
  const Machine& machine = request.machine;
  std::vector<std::string> violations;
  const auto require = [&](bool holds, const char* name, int64_t value, const std::string& legal) {
    if (!holds) violations.push_back(fmt::format("{}={}: {}", name, value, legal));
  };
  const auto is_positive_multiple = [](int64_t value, int64_t of) { return value > 0 && value % of == 0; };
  const bool ranks_legal = machine.ranks >= 1 && machine.ranks <= kMaxRanks;
  const int64_t groups = numerics.combine_groups;
  require(is_positive_multiple(shape.hidden, 8), "hidden", shape.hidden, "legal are positive multiples of 8");
  require(is_positive_multiple(shape.intermediate, 8), "intermediate", shape.intermediate,
          "legal are positive multiples of 8");
  require(shape.experts >= 1, "experts", shape.experts, "legal are 1 or more");
  require(shape.topk >= 1 && shape.topk <= std::max<int64_t>(shape.experts, 1), "topk", shape.topk,
          fmt::format("legal are 1 to the number of experts, {}", shape.experts));
  require(ranks_legal, "ranks", machine.ranks, fmt::format("legal are 1 to {}", kMaxRanks));
  require(machine.workers >= 1, "workers", machine.workers, "legal are 1 or more");
  if (ranks_legal && shape.experts >= 1) {
    require(shape.experts % machine.ranks == 0, "experts", shape.experts,
            fmt::format("must be a multiple of the number of ranks, {}", machine.ranks));
  }
  for (std::string& violation : activation_violations(numerics)) violations.push_back(std::move(violation));
  if (numerics.bias && numerics.router_weight == RouterWeight::kInput) {
    violations.emplace_back("bias=1: not with router_weight=input; legal with activation and output");
  }
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
