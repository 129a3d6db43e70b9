#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "program/schedule_fields.h"

// The rules between fields of a Schedule. A rule names the fields that it reads, so that validate() can skip it where
// one of them is out of its own range, and so that a search knows when it can be checked.
namespace uniep {

// What the rules compare a Schedule with.
struct RuleContext {
  Direction direction = Direction::kForward;
  Operation operation = Operation::kLayer;
  bool cuda = false;
  int64_t hidden = 8;
  int64_t topk = 1;
  int64_t ranks = 1;
  int64_t local_experts = 1;  // El; no bound where the shape is illegal
  int64_t combine_groups = 0;
  bool weighs_bias = false;  // the router's weight multiplies b2
  int64_t workers = 1;
  int64_t shared_memory_bytes = 0;
};
RuleContext rule_context(const ScheduleRequest& request);

struct Rule {
  FieldMask reads = 0;
  GemmStage stage = GemmStage::kFc1;  // of a rule about one stage's tile
  bool (*holds)(const Schedule&, const RuleContext&, GemmStage) = nullptr;
  std::string (*explain)(const Schedule&, const RuleContext&, GemmStage) = nullptr;  // begins with a field's name
};

// The rules that apply to a direction, machine and operation: those of every engine, and behind them those of the
// kernels that are built.
std::vector<Rule> schedule_rules(const RuleContext& context);
std::vector<Rule> kernel_rules(const RuleContext& context);  // none for the cpu engine, which runs all that is legal

// What is wrong with the shape, the numerics and the machine themselves, in words.
std::vector<std::string> shape_violations(const ScheduleRequest& request);

}  // namespace uniep
