#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "program/kernel_memory.h"
#include "program/rule_words.h"

// What the kernels of the cuda engine are built for.
namespace uniep {
namespace {

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
  rules.push_back(
      {reads_of_stages(context, kTileCluster) | reads(kCommRelaySms),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return s.comm.relay_sms % 2 == 0 || tile_value<kTileCluster>(s, stages_of(c.direction).front()) == 1;
       },
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return fmt::format("{}: must divide {}", given_by_stages(s, c, kTileCluster), given(s, kCommRelaySms));
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
  rules.push_back({reads(kOrderBlocksPerWave),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) { return s.order.blocks_per_wave == 0; },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kOrderBlocksPerWave) + ": in backward not built on cuda; legal is 0";
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

}  // namespace uniep
