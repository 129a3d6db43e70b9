#include "program/schedule_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "program/rule_words.h"

namespace uniep {
namespace {

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

void add_relay_rules(std::vector<Rule>& rules) {
  rules.push_back({reads(kCommWhere, kDispatchTransport, kCommRelaySms),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     const bool pushes = s.dispatch.transport == DispatchTransport::kPush;
                     return s.comm.relay_sms == 0 || (on_sms(s) && pushes);
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kCommRelaySms) +
                            ": needs comm.where=sms and dispatch.transport=push, else legal is 0";
                   }});
  rules.push_back(
      {reads(kCommRelaySms, kCommDispatchSms, kCommCombineSms, kCommReduceSms, kCommReserveSms),
       {},
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         const CommSchedule& comm = s.comm;
         return comm.relay_sms == 0 ||
                comm.relay_sms <= available(s, c) - comm.dispatch_sms - comm.combine_sms - comm.reduce_sms;
       },
       [](const Schedule& s, const RuleContext& c, GemmStage) {
         return fmt::format(
             "{}: with {}, {} and {} of {} available workers (workers - comm.reserve_sms) are left {}",
             given(s, kCommRelaySms), given(s, kCommDispatchSms), given(s, kCommCombineSms), given(s, kCommReduceSms),
             available(s, c),
             std::max<int64_t>(0, available(s, c) - s.comm.dispatch_sms - s.comm.combine_sms - s.comm.reduce_sms));
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

// Of the two row GEMMs in one launch.
void add_wave_order_rules(std::vector<Rule>& rules) {
  rules.push_back(
      {reads(kOrderBlocksPerWave, kOrderExpertsPerWave, kFusion),
       {},
       [](const Schedule& s, const RuleContext&, GemmStage) {
         return s.order.blocks_per_wave == 0 || (s.fusion == Fusion::kLayer && s.order.experts_per_wave == 1);
       },
       [](const Schedule& s, const RuleContext&, GemmStage) {
         return fmt::format("{}: needs fusion=layer and order.experts_per_wave=1, else legal is 0; {}, {}",
                            given(s, kOrderBlocksPerWave), given(s, kFusion), given(s, kOrderExpertsPerWave));
       }});
  rules.push_back({reads(kOrderSecondShare, kOrderInterleave, kQueue),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.order.second_share == 0 ||
                            (s.order.interleave == Interleave::kMixed && s.queue == QueueKind::kDynamic);
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return fmt::format("{}: needs order.interleave=mixed and queue=dynamic, else legal is 0; {}, {}",
                                        given(s, kOrderSecondShare), given(s, kOrderInterleave), given(s, kQueue));
                   }});
}

void add_order_rules(std::vector<Rule>& rules, const RuleContext& context) {
  add_wave_order_rules(rules);
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
  rules.push_back({reads(kBackwardWgrad, kOrderBlocksPerWave),
                   {},
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return s.wgrad != WgradOrder::kMixed || s.order.blocks_per_wave == 0;
                   },
                   [](const Schedule& s, const RuleContext&, GemmStage) {
                     return given(s, kOrderBlocksPerWave) +
                            ": backward.wgrad=mixed needs 0, its dgrads do not go by waves";
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

std::vector<Rule> schedule_rules(const RuleContext& context) {
  std::vector<Rule> rules;
  add_reserve_rule(rules);
  add_wave_rule(rules);
  if (context.operation == Operation::kLayer) {
    add_lend_rule(rules);
    add_worker_rules(rules);
    add_relay_rules(rules);
    add_combine_rules(rules);
    add_order_rules(rules, context);
    add_tile_rules(rules, context);
  } else {
    add_exchange_rules(rules, context);
  }
  for (const Rule& rule : kernel_rules(context)) rules.push_back(rule);
  return rules;
}

}  // namespace uniep
