#include "engine/cuda/place/group_placer.h"

#include "model/place.h"

namespace uniep::cuda {

GroupPlacer::GroupPlacer(SymmetricRegion& symmetric, const std::vector<KernelStore*>& kernels,
                         std::shared_ptr<BlockCache> cache, const Limits& limits, bool through_inbox)
    : symmetric_(symmetric),
      cache_(std::move(cache)),
      placer_(symmetric.control(), kernels, limits.wait_seconds, limits.arrival_seconds),
      through_inbox_(through_inbox) {
  placer_.set_call_failed([this](int rank) { return &symmetric_.signals().report(rank)->failed; });
  if (!through_inbox) return;
  placer_.set_row_inbox([this](int own_rank, int peer) { return symmetric_.rows(own_rank, peer); });
}

SymmetricNeed GroupPlacer::need_of(const internal::PlacementState& state) const {
  SymmetricNeed need;
  if (through_inbox_) need.rows = row_table_bytes(state);
  return need;
}

void GroupPlacer::read_counts(const Call& call, internal::PlacementState& state,
                              const std::vector<RankToPlace>& ranks) {
  PlacementCounts read = placer_.read_counts(call.shape, ranks);
  state.counts = std::move(read.counts);
  int64_t slots = 0;
  for (std::size_t rank = 0; rank < state.rank.size(); ++rank) {
    state.rank[rank].tokens = read.tokens[rank];
    slots += read.tokens[rank] * call.shape.topk;
  }
  require_slots(slots);
  state.local = {0, state.ranks};
}

std::shared_ptr<internal::PlacementState> GroupPlacer::place(const Call& call) {
  const SymmetricMemory& memory = symmetric_.control();
  const RankSpan local{memory.own_ranks().front(), static_cast<int>(memory.own_ranks().size())};
  std::shared_ptr<internal::PlacementState> state =
      begin_placement(call.shape, memory.ranks(), local, call.routings, call.capacity);
  Placer::require_supported(call.shape, state->ranks);
  std::vector<RankToPlace> ranks(call.targets.size());
  std::vector<internal::MemoryBlock> blocks;
  const auto take = [&](std::size_t i, auto&& carve) {
    const RankTarget& target = call.targets[i];
    blocks.push_back(internal::carved_block(cache_->allocator(), target.rank, Stream{target.stream}, carve));
  };
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    ranks[i].routing = call.routings[i];
    ranks[i].routing.stream = Stream{call.targets[i].stream};
    take(i, [&](internal::Carver& carver) {
      ranks[i].tables = carve_placement(carver, call.shape, state->ranks, call.routings[i].tokens);
      if (call.routings[i].routing_map == nullptr) return;
      ranks[i].slot_ids = carver.take<int32_t>(call.routings[i].tokens * call.shape.topk);
      ranks[i].slot_probs = carver.take<float>(call.routings[i].tokens * call.shape.topk);
    });
  }
  const auto take_rows = [&] {
    int64_t slots = 0;
    for (const internal::RankPlacement& rank : state->rank) slots += rank.tokens * call.shape.topk;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const auto rank = static_cast<std::size_t>(call.targets[i].rank);
      ranks[i].sources = slots;
      take(i, [&](internal::Carver& carver) {
        carve_rows(carver, ranks[i].tables, state->capacity > 0 ? state->capacity : state->padded_rows[rank], slots);
      });
    }
  };
  placer_.set_call(call.number);
  lay_out_counts(*state);
  placer_.make_slots(call.shape, ranks);
  if (call.capacity.rows > 0) {
    take_rows();
    call.reserve(need_of(*state));
    placer_.place(call.shape, ranks, {call.capacity.rows, call.capacity.tokens});
    state->counts_on_devices = true;
  } else {
    placer_.count(call.shape, ranks);
    read_counts(call, *state, ranks);
    lay_out_counts(*state);
    take_rows();
    call.reserve(need_of(*state));
    placer_.assign(call.shape, ranks);
  }
  placer_.invert_rows(call.shape, ranks);
  placer_.queue_reports(ranks);
  std::vector<PlacementTables> tables;
  for (const RankToPlace& rank : ranks) tables.push_back(rank.tables);
  const RankTarget& first = call.targets.front();
  auto placed = std::make_shared<PlacedTables>(std::move(tables), std::move(blocks), cache_, first.device);
  placed->set_number(call.number);
  if (state->counts_on_devices) placed->mark_placed(first.stream);
  state->engine_tables = std::move(placed);
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
  placer_.build_programs(calls, tables, own_streams);
}

void GroupPlacer::throw_noticed_failure() {
  if (placer_.has_noticed_failure()) placer_.throw_noticed_failure();
}

}  // namespace uniep::cuda
