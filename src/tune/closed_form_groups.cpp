#include <algorithm>
#include <cmath>

#include "program/rank_program.h"
#include "tune/closed_form_terms.h"

namespace uniep::tune {
namespace {

constexpr double kHelpers = 0.5;    // of the rate of sums: what warps that send nothing reach while others send
constexpr double kEarlySums = 0.5;  // of the last column chunk's sums: those that can be made while it is sent

}  // namespace

double grouped_send(const Problem& problem, int chunks, double work) {
  const RankLoad& load = problem.load;
  const sim::MachineDescription& machine = *problem.machine;
  const double tasks = problem.ranks * chunks * std::ceil(std::max(load.tokens, 1.0) / program::kTokenBlock);
  const double each = work / tasks, bytes = load.results * row_bytes(problem) / tasks;
  double send = each * tasks / problem.ranks;  // to itself
  int inside = 1;
  for (std::size_t level = 0; level < load.levels.size(); ++level) {
    const int reach = std::min(machine.links[level].ranks, problem.ranks);
    const double way =
        machine.links[level].latency + us_of_bytes(bytes, machine.link_rate(static_cast<int>(level), reach).write);
    send += std::max(each, way) * tasks * (reach - inside) / problem.ranks;
    inside = reach;
  }
  return send;
}

GroupedEnd grouped_end(const CombinePart& combine, const GroupedTimes& times) {
  const double chunks = combine.chunks;
  const double chunk = std::max(times.send, combine.link) / chunks;
  const double last = std::max(chunk, times.send_task);
  const bool sends_after = !combine.by_warps && combine.senders == 0;
  // A chunk is sent once all experts' tiles of it are done and the chunk before is sent.
  const double all = sends_after ? times.tiles : times.second_end;
  const double first = std::max(sends_after ? times.tiles : times.second_end - times.second * (1 - 1 / chunks),
                                combine.by_warps ? times.copied : 0);
  GroupedEnd end;
  end.there = std::max(all + last, first + chunk * (chunks - 1) + last);
  if (combine.own_summers) {
    const double before = std::min(combine.sum * (1 - 1 / chunks), times.sum_beside * (end.there - first - chunk));
    end.left = (combine.sum - std::max(0.0, before)) / times.sum_beside;
    return end;
  }
  const double beside = times.sum_beside * std::max(0.0, times.tiles - end.there);
  const double helped = std::min(combine.sum * (1 - kEarlySums / chunks),
                                 kHelpers * times.sum_after * std::max(0.0, end.there - times.tiles));
  end.left = std::max(0.0, combine.sum - beside - helped) / times.sum_after;
  return end;
}

}  // namespace uniep::tune
