#include "tune/solve.h"

#include <algorithm>
#include <ctime>
#include <optional>
#include <span>

#include "program/build.h"
#include "program/schedule_fields.h"
#include "tune/solve_space.h"

namespace uniep::tune {
namespace {

constexpr int kRounds = 2;             // of the clock, while all points are compared
constexpr std::size_t kCompared = 16;  // of a family, at least, with all rounds: few do not tell near ones apart

// A family is what runs in another way, not with other numbers.
constexpr int kFamilies = 24;
int family_of(const GemmChoice& gemm, const DispatchChoice& dispatch) {
  const int fusion = static_cast<int>(gemm.fusion);
  const int order = gemm.interleave == Interleave::kMixed || gemm.part.fills ? 1 : 0;
  return ((fusion * 2 + order) * 2 + static_cast<int>(dispatch.transport)) * 2 + static_cast<int>(dispatch.where);
}
constexpr double kFamilyReach = 1.12;  // a family's best is a candidate up to so many times the best of all

double thread_ms() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

struct Combination {
  double us;
  const GemmChoice* gemm;
  const DispatchChoice* dispatch;
  const CombineChoice* combine;
};

// The best of each family that is near the best of all, then the best of the rest.
std::vector<Combination> candidates_of(std::span<const std::vector<Combination>> families, std::size_t wanted) {
  std::vector<Combination> firsts, rest;
  for (const std::vector<Combination>& family : families) {
    if (!family.empty()) firsts.push_back(family.front());
    if (family.size() > 1) rest.insert(rest.end(), family.begin() + 1, family.end());
  }
  const auto by_time = [](const Combination& a, const Combination& b) { return a.us < b.us; };
  std::stable_sort(firsts.begin(), firsts.end(), by_time);
  while (firsts.back().us > kFamilyReach * firsts.front().us) firsts.pop_back();
  std::stable_sort(rest.begin(), rest.end(), by_time);
  rest.insert(rest.begin(), firsts.begin(), firsts.end());
  if (rest.size() > wanted) rest.resize(wanted);
  return rest;
}

// Changes one field alone, where that is legal. Worker counts go with comm.where.
std::optional<Schedule> with_value(const SolveRequest& request, const Schedule& schedule, int field, int value) {
  const Machine machine = sim::schedule_machine(*request.machine, request.ranks);
  Schedule other = schedule;
  descriptor_of(field).set(other, value);
  const bool legal =
      validate(
          other,
          {.direction = request.direction, .shape = request.shape, .numerics = request.numerics, .machine = machine})
          .empty();
  return legal ? std::optional<Schedule>(other) : std::nullopt;
}

std::vector<FieldGain> field_gains(const SolveRequest& request, const SolveSpace& space, const Schedule& best,
                                   double us) {
  std::vector<FieldGain> gains;
  for (const auto& [field, values] : space.fields()) {
    const FieldDescriptor& descriptor = descriptor_of(field);
    const int own = descriptor.get(best).value();
    std::optional<FieldGain> gain;
    for (const int value : values) {
      if (value == own) continue;
      const std::optional<Schedule> other = with_value(request, best, field, value);
      if (!other) continue;
      const double more = estimate(space.problem(), *other).us - us;
      if (gain && gain->us <= more) continue;
      gain = FieldGain{descriptor.field.name, value_text(descriptor.field, own), value_text(descriptor.field, value),
                       more};
    }
    if (gain) gains.push_back(*gain);
  }
  std::stable_sort(gains.begin(), gains.end(), [](const FieldGain& a, const FieldGain& b) { return a.us > b.us; });
  return gains;
}

}  // namespace

Problem problem_of(const SolveRequest& request, const RankLoad& load) {
  return make_problem({{request.shape, request.numerics}, request.ranks, request.direction, request.state}, load,
                      *request.machine);
}

const RankLoad& busiest(const SolveRequest& request, const Schedule& schedule) {
  const auto us = [&](const RankLoad& load) { return estimate(problem_of(request, load), schedule).us; };
  const RankLoad* most = &request.loads.front();
  for (const RankLoad& load : request.loads) {
    if (us(load) > us(*most)) most = &load;
  }
  return *most;
}

Solution solve(const SolveRequest& request) {
  const double begin = thread_ms();
  const SolveSpace space(request);
  const Problem& problem = space.problem();
  const double reserved = program::idle_workers(space.base());
  const double lent = space.base().comm.reserve_sms - reserved;
  const std::size_t wanted = static_cast<std::size_t>(std::max(request.best, 1));
  const std::size_t compared = std::max(wanted, kCompared);
  Solution solution;
  std::vector<Combination> families[kFamilies];  // each ascending; of equals the first
  space.for_each([&](const GemmChoice& gemm, const DispatchChoice& dispatch, const CombineChoice& combine) {
    ++solution.points;
    const double us = estimate(problem, {&gemm.part, &dispatch.part, &combine.part, reserved, lent}, kRounds).us;
    std::vector<Combination>& best = families[family_of(gemm, dispatch)];
    if (best.size() == compared && us >= best.back().us) return true;
    const auto at = std::lower_bound(best.begin(), best.end(), us,
                                     [](const Combination& candidate, double value) { return candidate.us < value; });
    if (at != best.end() && at->us == us) return true;
    best.insert(at, {us, &gemm, &dispatch, &combine});
    if (best.size() > compared) best.pop_back();
    return true;
  });
  for (std::vector<Combination>& family : families) {
    for (Combination& one : family) {
      one.us = estimate(problem, {&one.gemm->part, &one.dispatch->part, &one.combine->part, reserved, lent}).us;
    }
    std::stable_sort(family.begin(), family.end(),
                     [](const Combination& a, const Combination& b) { return a.us < b.us; });
  }
  std::vector<Combination> best = candidates_of(families, wanted);
  for (const Combination& candidate : best) {
    const Schedule schedule = space.schedule(*candidate.gemm, *candidate.dispatch, *candidate.combine);
    solution.best.push_back({schedule, estimate(problem, schedule).us});
  }
  std::stable_sort(solution.best.begin(), solution.best.end(),
                   [](const Ranked& a, const Ranked& b) { return a.us < b.us; });
  solution.default_schedule = space.base();
  solution.default_us = estimate(problem, solution.default_schedule).us;
  const Schedule& first = solution.best.front().schedule;
  solution.estimate = estimate(problem, first);
  for (const RankLoad& load : request.loads) {
    const Bound bound = lower_bound(problem_of(request, load));
    solution.bound.gemms = std::max(solution.bound.gemms, bound.gemms);
    solution.bound.links = std::max(solution.bound.links, bound.links);
    solution.bound.memory = std::max(solution.bound.memory, bound.memory);
    solution.bound.path = std::max(solution.bound.path, bound.path);
  }
  solution.gains = field_gains(request, space, first, solution.estimate.us);
  solution.solve_ms = thread_ms() - begin;
  return solution;
}

void for_each_point(const SolveRequest& request, const std::function<bool(const Schedule&)>& visit) {
  const SolveSpace space(request);
  space.for_each([&](const GemmChoice& gemm, const DispatchChoice& dispatch, const CombineChoice& combine) {
    return visit(space.schedule(gemm, dispatch, combine));
  });
}

std::vector<std::string> solved_values(const SolveRequest& request) {
  return SolveSpace(request).values();
}

}  // namespace uniep::tune
