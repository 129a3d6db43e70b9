#include "tune/load.h"

#include <algorithm>
#include <cmath>

#include "program/token_groups.h"

namespace uniep::tune {
namespace {

// That none of a token's K experts is among so many of E.
double miss(const LayerShape& shape, double experts) {
  double probability = 1;
  for (int64_t slot = 0; slot < shape.topk; ++slot) {
    const double left = static_cast<double>(shape.experts - slot);
    probability *= std::max(0.0, left - experts) / left;
  }
  return probability;
}

// A token's results.
double mean_results(const LayerShape& shape, int64_t combine_groups) {
  if (combine_groups == 0) return static_cast<double>(shape.topk);
  const double groups = static_cast<double>(combine_groups);
  return groups * (1 - miss(shape, static_cast<double>(shape.experts) / groups));
}

// The mean number of blocks of a number of rows that is nearly normal.
double mean_blocks(double mean, double variance) {
  const double deviation = std::sqrt(std::max(variance, 1e-9));
  double blocks = std::max(0.0, std::floor((mean - 8 * deviation) / kBlockRows));  // that are surely there
  for (double rows = blocks * kBlockRows;; rows += kBlockRows) {
    const double beyond = 0.5 * std::erfc((rows - mean) / deviation * M_SQRT1_2);
    blocks += beyond;
    if (rows > mean && beyond < 1e-6) return blocks;
  }
}

}  // namespace

RankLoad uniform_load(const LayerShape& shape, int ranks, double tokens, const sim::MachineDescription& machine,
                      int64_t combine_groups) {
  RankLoad load;
  const double topk = static_cast<double>(shape.topk), experts = static_cast<double>(shape.experts);
  load.tokens = tokens;
  load.local_experts = experts / ranks;
  load.rows = tokens * topk;
  load.results = load.summands = tokens * mean_results(shape, combine_groups);
  const double share = topk / experts, batch = tokens * ranks;
  load.active_experts = load.local_experts * (1 - std::pow(1 - share, batch));
  load.blocks = load.local_experts * mean_blocks(batch * share, batch * share * (1 - share));
  load.rows_once = batch * (1 - miss(shape, load.local_experts));
  int inside = 1;  // ranks that a level's predecessor reaches
  for (const sim::LinkLevel& link : machine.links) {
    const int reach = std::min(link.ranks, ranks);
    const double others = static_cast<double>(reach - inside) / ranks;
    LevelRows rows;
    rows.dispatched = rows.sent = load.rows * others;
    rows.returned = rows.received = load.results * others;
    rows.dispatched_once = load.rows_once * others;
    if (link.relay) {
      rows.dispatched_once = batch * (1 - miss(shape, load.local_experts * inside)) / inside * others;
    }
    rows.sent_once = rows.dispatched_once;
    load.levels.push_back(rows);
    inside = reach;
  }
  return load;
}

RankLoad load_of(const internal::PlacementState& placement, int rank, const sim::MachineDescription& machine,
                 int64_t combine_groups) {
  RankLoad load;
  const LayerShape& shape = placement.shape;
  load.levels.resize(machine.links.size());
  load.tokens = static_cast<double>(placement.rank[rank].tokens);
  load.rows = static_cast<double>(placement.rows[rank]);
  const int32_t first = placement.expert_begin[rank], end = placement.expert_begin[rank + 1];
  load.local_experts = end - first;
  for (int32_t expert = first; expert < end; ++expert) {
    const auto blocks = (placement.expert_rows[expert] + kBlockRows - 1) / kBlockRows;
    load.blocks += static_cast<double>(blocks);
    load.active_experts += blocks > 0 ? 1 : 0;
  }
  // A relay takes a row once for its node, whose ranks share the way.
  const auto level_of = [&](int other) { return machine.level_between(rank, other); };
  const auto relays = [&](int level) { return level > 0 && machine.links[level].relay; };
  const auto same_node = [&](int a, int b, int level) { return a == b || machine.level_between(a, b) < level; };
  std::vector<int32_t> seen;
  for (int source = 0; source < placement.ranks; ++source) {
    const internal::RankPlacement& from = placement.rank[source];
    const bool remote = source != rank && !load.levels.empty();
    const int level = remote ? level_of(source) : 0;
    LevelRows* const rows = remote ? &load.levels[level] : nullptr;
    program::TokenGroups groups(shape.experts, combine_groups);
    const int ranks_of_node = remote && relays(level) ? std::min(machine.links[level - 1].ranks, placement.ranks) : 1;
    for (int64_t token = 0; token < from.tokens; ++token) {
      bool here = false, in_node = false;
      seen.clear();
      for (int64_t slot = 0; slot < shape.topk; ++slot) {
        const int32_t expert = from.expert_of_slot[token * shape.topk + slot];
        if (expert < 0) continue;
        const int32_t owner = placement.rank_of_expert[expert];
        in_node |= ranks_of_node > 1 && same_node(rank, owner, level);
        const bool result = groups.is_first(token, expert);  // the others of a group are summed with the first one
        if (owner == rank) {
          here = true;
          load.results += result;
          if (rows != nullptr) ++rows->dispatched, rows->returned += result;
        }
        if (source != rank) continue;
        load.summands += result;
        if (owner == rank || load.levels.empty()) continue;
        const int away = level_of(owner);
        LevelRows& out = load.levels[away];
        ++out.sent;
        out.received += result;
        const bool taken = std::any_of(seen.begin(), seen.end(), [&](int32_t other) {
          return relays(away) ? same_node(other, owner, away) : other == owner;
        });
        if (taken) continue;
        seen.push_back(owner);
        ++out.sent_once;
      }
      if (in_node) rows->dispatched_once += 1.0 / ranks_of_node;
      if (!here) continue;
      ++load.rows_once;
      if (rows != nullptr && ranks_of_node == 1) ++rows->dispatched_once;
    }
  }
  return load;
}

}  // namespace uniep::tune
