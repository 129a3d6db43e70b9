#include "engine/cuda/layer/group_placer.h"

#include "api/place.h"
#include "engine/cuda/driver.h"

namespace uniep::cuda {
GroupPlacer::GroupPlacer(const RankDevices& ranks, const std::vector<KernelStore*>& kernels,
                         std::shared_ptr<BlockCache> cache, double wait_seconds, double arrival_seconds)
    : cache_(std::move(cache)),
      memory_(ranks.make_memory(Placer::symmetric_bytes())),
      placer_(std::make_unique<Placer>(*memory_, kernels, wait_seconds, arrival_seconds)) {}

std::shared_ptr<internal::PlacementState> GroupPlacer::place(const LayerShape& shape, std::span<const Routing> routings,
                                                             Capacity capacity,
                                                             const std::vector<RankTarget>& targets) {
  std::shared_ptr<internal::PlacementState> state =
      begin_placement(shape, static_cast<int>(targets.size()), routings, capacity);
  Placer::require_supported(shape, state->ranks);
  std::vector<RankToPlace> ranks(targets.size());
  std::vector<internal::MemoryBlock> memory;
  int64_t slots = 0;
  for (const Routing& routing : routings) slots += routing.tokens * shape.topk;
  const auto take = [&](std::size_t i, auto&& carve) {
    memory.push_back(internal::carved_block(cache_->allocator(), targets[i].rank, Stream{targets[i].stream}, carve));
  };
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    ranks[i].routing = routings[i];
    ranks[i].routing.stream = Stream{targets[i].stream};
    take(i, [&](internal::Carver& carver) {
      ranks[i].tables = carve_placement(carver, shape, state->ranks, routings[i].tokens);
    });
  }
  const auto take_rows = [&](std::size_t i, int64_t rows) {
    take(i, [&](internal::Carver& carver) {
      ranks[i].tables.rows = carver.take<RowSource>(rows);
      ranks[i].tables.row_of_source = carver.take<int32_t>(slots);
    });
  };
  if (capacity.rows > 0) {
    for (std::size_t i = 0; i < ranks.size(); ++i) take_rows(i, capacity.rows);
    placer_->place(shape, ranks, capacity.rows);
    state->counts_on_devices = true;
    lay_out_counts(*state);
  } else {
    placer_->count(shape, ranks);
    state->counts = placer_->read_counts(shape, ranks).counts;
    lay_out_counts(*state);
    for (std::size_t i = 0; i < ranks.size(); ++i) take_rows(i, state->padded_rows[i]);
    placer_->assign(shape, ranks);
  }
  placer_->invert_rows(shape, ranks, slots);
  placer_->queue_reports(ranks);
  std::vector<PlacementTables> tables;
  for (const RankToPlace& rank : ranks) tables.push_back(rank.tables);
  state->engine_tables = std::make_shared<PlacedTables>(std::move(tables), std::move(memory), cache_, weak_from_this());
  return state;
}

void GroupPlacer::build_programs(const std::vector<RankCall*>& calls, const std::vector<DeviceProgram>& programs,
                                 const std::vector<CUstream>& streams) {
  std::vector<ProgramTables> tables;
  std::vector<Stream> own_streams;
  for (std::size_t i = 0; i < programs.size(); ++i) {
    tables.push_back(programs[i].tables);
    own_streams.push_back(Stream{streams[i]});
  }
  placer_->build_programs(calls, tables, own_streams);
}

std::vector<int32_t> GroupPlacer::counts(const LayerShape& shape, const PlacementTables& tables) {
  memory_->barrier();
  throw_noticed_failure();
  std::vector<int32_t> counts(static_cast<std::size_t>(memory_->ranks() * shape.experts));
  const ScopedDevice scope(memory_->device(0));
  check(driver().cuMemcpyDtoHAsync(counts.data(), reinterpret_cast<CUdeviceptr>(tables.counts),
                                   counts.size() * sizeof(int32_t), nullptr),
        "reading counts");
  check(driver().cuCtxSynchronize(), "reading counts");
  return counts;
}

void GroupPlacer::throw_noticed_failure() {
  if (placer_->has_noticed_failure()) placer_->throw_noticed_failure();
}

}  // namespace uniep::cuda
