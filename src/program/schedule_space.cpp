#include "program/schedule_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <set>

#include "program/buildable.h"
#include "program/canonical.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using Values = std::vector<std::optional<int>>;  // nullopt: a stage's tile field has no value of its own

struct Variable {
  int field;
  Values values;
};

bool is_worker_count(int field) {
  return field == kCommDispatchSms || field == kCommRelaySms || field == kCommCombineSms || field == kCommReduceSms ||
         field == kCommReserveSms;
}

// The largest value that this machine and shape can admit.
int64_t most_of(int field, const RuleContext& context) {
  if (is_worker_count(field)) return context.workers;
  if (field == kOrderExpertsPerWave) return context.local_experts;
  return std::numeric_limits<int>::max();
}

bool is_representative(int field, int value, const RuleContext& context) {
  const bool power_of_two = std::has_single_bit(static_cast<unsigned>(value));
  if (is_worker_count(field)) return value <= 2 || value == 4 || value % 8 == 0;
  if (field == kOrderExpertsPerWave) return value <= 8 || power_of_two || value == context.local_experts;
  if (field == kCommStages) return power_of_two || value == 3;
  return field != kOrderRaster || power_of_two;
}

Values possible_values(int field, const RuleContext& context, bool representative_only) {
  Values values;
  if (descriptor_of(field).stage) values.emplace_back(std::nullopt);
  for (const int value : legal_values(descriptor_of(field).field, most_of(field, context))) {
    if (!representative_only || is_representative(field, value, context)) values.emplace_back(value);
  }
  return values;
}

// Assigns variables one after the other, and checks each rule as soon as the fields that it reads have their values.
class Search {
 public:
  Search(const RuleContext& context, const Schedule& base, std::vector<Variable> variables)
      : Search(context, schedule_rules(context), base, std::move(variables)) {}
  Search(const RuleContext& context, std::vector<Rule> rules, const Schedule& base, std::vector<Variable> variables)
      : context_(context), rules_(std::move(rules)), schedule_(base), variables_(std::move(variables)) {
    FieldMask open = 0;
    for (const Variable& variable : variables_) open |= field_bit(variable.field);
    for (Rule& rule : rules_) rule.reads &= open;
    checks_.resize(variables_.size());
    for (const Variable& variable : variables_) {
      const FieldMask bit = field_bit(variable.field);
      open &= ~bit;
      for (const Rule& rule : rules_) {
        if ((rule.reads & bit) != 0 && (rule.reads & open) == 0)
          checks_[&variable - variables_.data()].push_back(&rule);
      }
    }
  }
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  const std::vector<Variable>& variables() const { return variables_; }
  Schedule& schedule() { return schedule_; }

  // The rules that no variable can change.
  bool base_holds() const {
    return std::all_of(rules_.begin(), rules_.end(), [&](const Rule& rule) { return rule.reads != 0 || holds(rule); });
  }

  // Gives the variable its value; true when the rules that can be checked now hold.
  bool assign(std::size_t variable, std::optional<int> value) {
    descriptor_of(variables_[variable].field).set(schedule_, value);
    return std::all_of(checks_[variable].begin(), checks_[variable].end(),
                       [&](const Rule* rule) { return holds(*rule); });
  }

  bool visit(const ScheduleVisitor& visitor, std::size_t variable = 0) {
    if (variable == variables_.size()) return visitor(schedule_);
    for (const std::optional<int> value : variables_[variable].values) {
      if (assign(variable, value) && !visit(visitor, variable + 1)) return false;
    }
    return true;
  }

  uint64_t count() { return count(step_of(all_variables())); }

 private:
  bool holds(const Rule& rule) const { return rule.holds(schedule_, context_, rule.stage); }

  FieldMask all_variables() const {
    FieldMask all = 0;
    for (const Variable& variable : variables_) all |= field_bit(variable.field);
    return all;
  }

  const Values& values_of(int field) const {
    return std::find_if(variables_.begin(), variables_.end(),
                        [field](const Variable& variable) { return variable.field == field; })
        ->values;
  }

  // The open fields that are tied to `field` by rules, directly or not.
  FieldMask component_of(FieldMask field, FieldMask open) const {
    for (FieldMask before = 0; before != field;) {
      before = field;
      for (const Rule& rule : rules_) {
        if ((rule.reads & field) != 0) field |= rule.reads & open;
      }
    }
    return field;
  }

  // Of a component the field with the fewest values, and of these the one that most rules tie to others: it cuts the
  // component into smaller ones soonest.
  int first_assigned(FieldMask component) const {
    int first = -1, most_ties = 0;
    std::size_t fewest = 0;
    for (FieldMask left = component; left != 0; left &= left - 1) {
      const int field = first_field(left);
      const std::size_t values = values_of(field).size();
      int ties = 0;
      for (const Rule& rule : rules_) {
        if ((rule.reads & field_bit(field)) != 0) ties += field_count(rule.reads & component) - 1;
      }
      if (first >= 0 && (values > fewest || (values == fewest && ties <= most_ties))) continue;
      first = field;
      fewest = values;
      most_ties = ties;
    }
    return first;
  }

  // Fields that no rule ties together multiply, so a component at a time is counted, a value of one field at a time.
  // How is the same whatever the values, and so worked out once for each set of open fields.
  struct Step {
    int field = 0;
    const Values* values = nullptr;
    std::vector<const Rule*> rules;  // whose last field it is
    const Step* next = nullptr;      // for the rest of its component
    const Step* beside = nullptr;    // for the other components
  };

  const Step* step_of(FieldMask open) {
    if (open == 0) return nullptr;
    const auto [found, is_new] = steps_.try_emplace(open);
    Step& step = found->second;
    if (!is_new) return &step;
    const FieldMask component = component_of(open & (~open + 1), open);
    step.field = first_assigned(component);
    step.values = &values_of(step.field);
    const FieldMask left = component & ~field_bit(step.field);
    for (const Rule& rule : rules_) {
      if ((rule.reads & field_bit(step.field)) != 0 && (rule.reads & left) == 0) step.rules.push_back(&rule);
    }
    step.next = step_of(left);
    step.beside = step_of(open & ~component);
    return &step;
  }

  uint64_t count(const Step* step) {
    if (step == nullptr) return 1;
    const uint64_t others = count(step->beside);
    if (others == 0) return 0;
    uint64_t sum = 0;
    for (const std::optional<int> value : *step->values) {
      descriptor_of(step->field).set(schedule_, value);
      const bool legal =
          std::all_of(step->rules.begin(), step->rules.end(), [&](const Rule* rule) { return holds(*rule); });
      if (legal && __builtin_add_overflow(sum, count(step->next), &sum)) return std::numeric_limits<uint64_t>::max();
    }
    return __builtin_mul_overflow(sum, others, &sum) ? std::numeric_limits<uint64_t>::max() : sum;
  }

  RuleContext context_;
  std::vector<Rule> rules_;  // `reads` cut down to the variables
  Schedule schedule_;
  std::vector<Variable> variables_;
  std::vector<std::vector<const Rule*>> checks_;  // by variable: the rules whose last field it is
  std::map<FieldMask, Step> steps_;               // by the open fields
};

std::vector<Variable> variables_of(const SpaceLimits& limits, const RuleContext& context) {
  std::set<int> fields;
  for (const std::string& name : limits.vary) {
    const std::optional<FieldId> field = find_field(name);
    if (!field || limits.fixed.given(name)) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("vary={}: {}", printable(name),
                              field ? "the field is fixed; legal is one that is not"
                                    : "no such field; the nearest legal one is " + nearest_field_name(name)));
    }
    fields.insert(*field);
  }
  if (limits.vary.empty()) {
    for (int field = 0; field < kCommonFieldCount; ++field) {
      const bool is_read =
          (field != kBackwardWgrad && field != kBackwardWgradReserve) || context.direction == Direction::kBackward;
      if (is_read && !limits.fixed.given(name_of(field))) fields.insert(field);
    }
  }
  std::vector<Variable> variables;
  variables.reserve(fields.size());
  for (const int field : fields) variables.push_back({field, possible_values(field, context, true)});
  return variables;
}

// Steele, Lea and Flood's splitmix64: three multiplications and shifts, the same numbers everywhere.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Below `bound`; the bias of the remainder is at most bound / 2^64.
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }

 private:
  uint64_t state_;
};

// Draws the variables in order, each among the values that the rules leave it. False where none is left. One stage's
// own field may be always drawn.
bool draw(Search& search, SplitMix64& random, int always_drawn) {
  constexpr std::size_t kSchedulesPerOwnTiles = 4;  // one in so many gives stages tile values of their own,
  constexpr std::size_t kFieldsPerOwnValue = 8;     // and there one field in so many
  const bool with_own_tiles = random.below(kSchedulesPerOwnTiles) == 0;
  for (std::size_t variable = 0; variable < search.variables().size(); ++variable) {
    const Variable& drawn = search.variables()[variable];
    const bool is_own_tile = descriptor_of(drawn.field).stage.has_value();
    const bool gets_own = drawn.field == always_drawn || (with_own_tiles && random.below(kFieldsPerOwnValue) == 0);
    if (is_own_tile && !gets_own) {
      if (!search.assign(variable, std::nullopt)) return false;
      continue;
    }
    Values left = drawn.values;
    if (is_own_tile) left.erase(left.begin());
    for (;;) {
      if (left.empty()) return false;
      const std::size_t pick = random.below(left.size());
      if (search.assign(variable, left[pick])) break;
      left[pick] = left.back();
      left.pop_back();
    }
  }
  return true;
}

}  // namespace

void for_each_legal(const ScheduleRequest& request, const ScheduleVisitor& visitor, const SpaceLimits& limits) {
  const RuleContext context = rule_context(request);
  std::vector<Variable> variables = variables_of(limits, context);
  if (!shape_violations(request).empty()) return;
  Search search(context, fill(limits.fixed, request), std::move(variables));
  if (search.base_holds()) search.visit(visitor);
}

uint64_t count_legal(const ScheduleRequest& request, const SpaceLimits& limits) {
  const RuleContext context = rule_context(request);
  std::vector<Variable> variables = variables_of(limits, context);
  if (!shape_violations(request).empty()) return 0;
  Search search(context, fill(limits.fixed, request), std::move(variables));
  return search.base_holds() ? search.count() : 0;
}

SpaceCounts count_space(const ScheduleRequest& request, const SpaceLimits& limits, uint64_t most_visits) {
  const RuleContext context = rule_context(request);
  const std::vector<Variable> variables = variables_of(limits, context);
  SpaceCounts counts;
  if (!shape_violations(request).empty()) return {0, 0, 0};
  const Schedule base = fill(limits.fixed, request);
  const auto count = [&](const RuleContext& of, std::vector<Rule> rules) {
    Search search(of, std::move(rules), base, variables);
    return search.base_holds() ? search.count() : 0;
  };
  RuleContext any_engine = context;
  any_engine.cuda = false;
  counts.legal = count(any_engine, schedule_rules(any_engine));
  if (!engine_limits(request).empty()) return {counts.legal, 0, 0};
  counts.buildable = count(context, schedule_rules(context));
  const bool own_tiles_vary = std::any_of(variables.begin(), variables.end(), [](const Variable& variable) {
    return descriptor_of(variable.field).stage.has_value();
  });
  if (!own_tiles_vary) {
    FieldMask varied = 0;
    for (const Variable& variable : variables) varied |= field_bit(variable.field);
    std::vector<Rule> rules = schedule_rules(context);
    for (const Rule& rule : canonical_rules(varied, base, context)) rules.push_back(rule);
    counts.distinct = count(context, std::move(rules));
  } else if (counts.buildable <= most_visits) {
    std::set<std::string> names;
    for_each_legal(
        request,
        [&](const Schedule& schedule) {
          names.insert(to_text(canonical(schedule, request)));
          return true;
        },
        limits);
    counts.distinct = names.size();
  }
  return counts;
}

std::vector<std::string> space_values(const ScheduleRequest& request, const SpaceLimits& limits) {
  std::vector<std::string> lines;
  for (const Variable& variable : variables_of(limits, rule_context(request))) {
    std::string line = name_of(variable.field) + ":";
    for (const std::optional<int> value : variable.values) {
      line += (line.back() == ':' ? " " : ", ") +
              (value ? value_text(descriptor_of(variable.field).field, *value) : std::string("none of its own"));
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

Schedule sample_legal(uint64_t seed, const ScheduleRequest& request, const PartialSchedule& fixed) {
  constexpr int kMaxAttempts = 10000;
  const Schedule fallback = resolve(fixed, request);
  const RuleContext context = rule_context(request);
  std::vector<Variable> variables;
  // Stages' own values first: the common tile is then drawn so that it suits them.
  for (int index = 0; index < kFieldCount; ++index) {
    const int field = (index + kCommonFieldCount) % kFieldCount;
    if (!fixed.given(name_of(field))) variables.push_back({field, possible_values(field, context, false)});
  }
  // Last what refines other fields' values, which then are as likely as without.
  std::stable_partition(variables.begin(), variables.end(), [](const Variable& variable) {
    return variable.field != kCommRelaySms && variable.field != kOrderBlocksPerWave &&
           variable.field != kOrderExperts && variable.field != kOrderSecondShare;
  });
  // On cuda dgrad FC2's columns are seldom those of the other stages.
  const bool has_other_columns = context.cuda && request.direction == Direction::kBackward;
  const int always_drawn = has_other_columns ? static_cast<int>(stage_field(GemmStage::kDgradFc2, kTileN)) : -1;
  SplitMix64 random(seed);
  Search search(context, fallback, std::move(variables));
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    if (draw(search, random, always_drawn)) return search.schedule();
  }
  return fallback;
}

}  // namespace uniep
