#include "sim/machine.h"

#include <cmath>

namespace uniep::sim {

const char* work_name(Work work) {
  const char* const names[kWorkCount] = {"dispatch",  "fc1",       "fc2",        "dgrad_fc2", "dgrad_fc1",
                                         "wgrad_fc2", "wgrad_fc1", "activation", "combine",   "reduce"};
  return names[static_cast<int>(work)];
}

Work work_of(GemmStage stage) {
  return static_cast<Work>(static_cast<int>(Work::kFc1) + static_cast<int>(stage));
}
static_assert(static_cast<int>(Work::kWgradFc1) - static_cast<int>(Work::kFc1) ==
              static_cast<int>(GemmStage::kWgradFc1) - static_cast<int>(GemmStage::kFc1));

const WorkerClass& MachineDescription::class_of(Work work) const {
  for (const WorkerClass& one : workers) {
    if (one.work.has(work)) return one;
  }
  return workers.front();
}

bool MachineDescription::has_activation_stage() const {
  return class_of(Work::kActivation).work.has(Work::kActivation);
}

int MachineDescription::level_between(int rank, int other) const {
  int level = 0;
  while (level + 1 < static_cast<int>(links.size()) && rank / links[level].ranks != other / links[level].ranks) ++level;
  return level;
}

double MachineDescription::tile_cycles(Work work, int rows, int columns, int64_t k) const {
  const double wanted = static_cast<double>(rows) * columns;
  const TileCost* nearest = nullptr;
  double distance = 0;
  for (const TileCost& tile : tiles) {
    if (!tile.work.has(work)) continue;
    const double away = std::abs(std::log(wanted / (static_cast<double>(tile.rows) * tile.columns)));
    if (nearest == nullptr || away < distance) nearest = &tile, distance = away;
  }
  if (nearest == nullptr) return 0;
  const double share = wanted / (static_cast<double>(nearest->rows) * nearest->columns);
  return share * (nearest->cycles_per_k * static_cast<double>(k) + nearest->cycles);
}

LinkRate MachineDescription::link_rate(int level, int ranks) const {
  const std::vector<LinkRate>& rates = links[level].rates;
  if (ranks <= rates.front().ranks) return rates.front();
  for (std::size_t i = 1; i < rates.size(); ++i) {
    const LinkRate &low = rates[i - 1], &high = rates[i];
    if (ranks > high.ranks) continue;
    const double share =
        std::log(static_cast<double>(ranks) / low.ranks) / std::log(static_cast<double>(high.ranks) / low.ranks);
    const auto between = [&](double a, double b) { return a + share * (b - a); };
    return {ranks, between(low.read, high.read), between(low.write, high.write), between(low.both, high.both)};
  }
  return rates.back();
}

Machine schedule_machine(const MachineDescription& machine, int ranks) {
  Machine made;
  made.engine = EngineKind::kCuda;
  made.ranks = ranks;
  made.workers = static_cast<int>(machine.class_of(Work::kFc1).count);
  made.shared_memory_bytes = static_cast<int64_t>(machine.memory.shared);
  return made;
}

}  // namespace uniep::sim
