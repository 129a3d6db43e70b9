#include "engine/cuda/place/device_placement.h"

#include <algorithm>
#include <limits>
#include <string>

#include "comm/memory_reclaimer.h"
#include "engine/cuda/memory/signals.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/stream.h"
#include "model/placement_errors.h"

namespace uniep::cuda {
namespace {

constexpr int kMaxCtasOfRank = 64;  // more make the sums over CTAs longer than what they save
constexpr int64_t kMaxRowCount = std::numeric_limits<int32_t>::max() - kRowAlignment;

void require_ranks(int ranks) {
  if (ranks <= kMaxCudaRanks) return;
  throw Error(Status::kUnsupported,
              "ranks: " + std::to_string(ranks) + "; the cuda engine places for 1 to " + std::to_string(kMaxCudaRanks));
}

// CTAs of a kernel that has a warp for each token, and walks on where there are more.
int dense_blocks(int64_t tokens) {
  constexpr int64_t kMaxBlocks = 1024, kTokens = kDenseThreads / 32;
  return static_cast<int>(std::min(kMaxBlocks, (tokens + kTokens - 1) / kTokens));
}

uint64_t nanoseconds(double seconds) {
  return static_cast<uint64_t>(seconds * 1e9);
}

// Whether the ranks may not have come to the same end.
bool is_timeout(PlaceFault fault) {
  return fault != PlaceFault::kRouting && fault != PlaceFault::kOverflow && fault != PlaceFault::kOtherArguments;
}

std::string words(const PlaceTerms& terms) {
  const auto limit = [](int64_t value) { return value == 0 ? std::string("any") : std::to_string(value); };
  return std::to_string(terms.experts) + " experts, top-k " + std::to_string(terms.topk) + ", " +
         (terms.row_limit == kMaxRowCount ? "rows by need" : "capacity rows " + limit(terms.row_limit)) + ", tokens " +
         limit(terms.tokens);
}

// `running`: what the peer does instead.
[[noreturn]] void raise(const PlaceReport& report, int rank, const std::string& running) {
  const std::string waited = "rank " + std::to_string(rank) + " waited too long in placement, for ";
  const std::string hint = "; recover() makes the group usable again";
  switch (report.fault) {
    case PlaceFault::kRouting:
      refuse_slot({report.routing_fault, report.rank, report.entry / report.topk, report.entry % report.topk, report.id,
                   report.prob, report.dense != 0},
                  report.experts, report.topk);
    case PlaceFault::kOverflow:
      refuse_rows({report.rank, report.rows, report.limit, report.expert, report.expert_rows});
    case PlaceFault::kOtherArguments:
      throw Error(Status::kInvalidArgument, "place: rank " + std::to_string(rank) + " gives " + words(report.terms) +
                                                "; rank " + std::to_string(report.rank) + " gives " +
                                                words(report.peers_terms) + "; they must be the same on all ranks");
    case PlaceFault::kPeerFailed:
      throw Error(Status::kTimeout,
                  "rank " + std::to_string(report.rank) + " gave up a placement, or left the group" + hint);
    case PlaceFault::kPeerGaveUp:
      throw Error(Status::kTimeout, "the placement failed on rank " + std::to_string(report.rank) + hint);
    case PlaceFault::kCountsMissing:
      throw Error(Status::kTimeout, waited + "the counts of rank " + std::to_string(report.rank) + running + hint);
    case PlaceFault::kRowsMissing:
      throw Error(Status::kTimeout, waited + "the rows of rank " + std::to_string(report.rank) + hint);
    default:
      throw Error(Status::kTimeout, waited + "its own CTAs" + hint);
  }
}

}  // namespace

#define UNIEP_TABLE(type, name, entries) tables.name = carver.take<type>(entries);

PlacementTables carve_placement(internal::Carver& carver, const LayerShape& shape, int ranks, int64_t tokens) {
  const TableSizes s{.experts = shape.experts, .ranks = ranks, .tokens = tokens, .topk = shape.topk};
  PlacementTables tables{};
  UNIEP_PLACEMENT_TABLES(UNIEP_TABLE)
  tables.rows = nullptr;  // carve_rows()
  tables.row_of_source = nullptr;
  return tables;
}

void carve_rows(internal::Carver& carver, PlacementTables& tables, int64_t rows, int64_t sources) {
  tables.rows = carver.take<RowSource>(rows);
  // Cleared together, before the rows are made.
  tables.row_of_source = carver.take<int32_t>(sources + 1);
  tables.whole = reinterpret_cast<uint32_t*>(tables.row_of_source + sources);
}

ProgramTables carve_program(internal::Carver& carver, const LayerShape& shape, int ranks) {
  const TableSizes s{.experts = shape.experts, .ranks = ranks, .local_experts = shape.experts / ranks};
  ProgramTables tables{};
  UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
  return tables;
}

#undef UNIEP_TABLE

Placer::Placer(SymmetricMemory& memory, const std::vector<KernelStore*>& kernels, double wait_seconds,
               double arrival_seconds)
    : memory_(memory), wait_seconds_(wait_seconds), arrival_seconds_(arrival_seconds) {
  require_ranks(memory.ranks());
  try {
    take(kernels);
    clear_own();
  } catch (...) {
    release();
    throw;
  }
}

void Placer::take(const std::vector<KernelStore*>& kernels) {
  for (const int rank : memory_.own_ranks()) {
    const int device = memory_.device(rank);
    auto found = std::find_if(devices_.begin(), devices_.end(), [&](const auto& of) { return of.device == device; });
    if (found == devices_.end()) {
      found = devices_.insert(devices_.end(),
                              DeviceRanks{.device = device, .kernels = kernels.at(own_.size()), .index = {}});
    }
    found->index.push_back(own_.size());
    own_.push_back({rank, device, nullptr, nullptr, nullptr, SideStream(device)});
  }
  for (DeviceRanks& of : devices_) {
    const ScopedDevice scope(of.device);
    const int processors = device_attribute(of.device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    of.ctas = std::clamp(processors / static_cast<int>(of.index.size()), 1, kMaxCtasOfRank);
    load(of);
    for (const size_t i : of.index) {
      const size_t counts = static_cast<size_t>(of.ctas) * kMaxPlaceExperts;
      const size_t counts_bytes = (counts + static_cast<size_t>(of.ctas) * kTokenClasses) * sizeof(int32_t);
      CUdeviceptr address = 0;
      cuda::check(allocate_or_reclaim(of.device,
                                      [&] { return driver().cuMemAlloc(&address, sizeof(PlaceState) + counts_bytes); }),
                  "allocating a rank's placement state");
      own_[i].state = reinterpret_cast<PlaceState*>(address);
      own_[i].chunk_counts = reinterpret_cast<int32_t*>(own_[i].state + 1);
      own_[i].chunk_tokens = own_[i].chunk_counts + counts;
    }
  }
  const ScopedDevice scope(own_.front().device);
  void* host = nullptr;
  cuda::check(driver().cuMemHostAlloc(&host, sizeof(HostMemory), CU_MEMHOSTALLOC_PORTABLE),
              "allocating page-locked memory");
  host_ = static_cast<HostMemory*>(host);
}

// At once: loading may wait for kernels that run, and those may wait for a peer.
void Placer::load(DeviceRanks& of) {
  const ScopedDevice scope(of.device);
  const uint64_t generation = of.kernels->generation();
  of.kernels->prepare(placement_kernels());
  of.place = of.kernels->get(place_request(), place_shared_bytes(kMaxPlaceExperts));
  of.row_of_source = of.kernels->get(row_of_source_request(), 0);
  of.program_tables = of.kernels->get(program_tables_request(), 0);
  of.slots_of_map = of.kernels->get(slots_of_map_request(), 0);
  of.kernels->get(dense_dprobs_request(), 0);
  of.kernels->get(call_times_request(), 0);
  of.kernels->get(empty_nan_request(), 0);
  of.generation = generation;
}

void Placer::load_again() {
  for (DeviceRanks& of : devices_) {
    if (of.generation != of.kernels->generation()) load(of);
  }
}

Placer::~Placer() {
  release();
}

void Placer::release() noexcept {
  for (const OwnRank& own : own_) {
    if (own.state == nullptr) continue;
    const ScopedDevice scope(own.device, std::nothrow);
    driver().cuMemFree(device_pointer(own.state));
  }
  if (host_ != nullptr) driver().cuMemFreeHost(host_);
}

void Placer::clear() {
  clear_own();
  for (OwnRank& own : own_) own.stream.clear(control(own.rank, own.rank), sizeof(GroupControl));
}

void Placer::clear_own() {
  for (OwnRank& own : own_) own.stream.clear(own.state, sizeof(PlaceState));
  std::fill_n(host_->report, kMaxCudaRanks, PlaceReport{});
  timed_out_ = false;
}

void Placer::require_supported(const LayerShape& shape, int ranks) {
  require_ranks(ranks);
  if (shape.experts > kMaxPlaceExperts) {
    throw Error(Status::kUnsupported, "experts: " + std::to_string(shape.experts) +
                                          "; the cuda engine places at most " + std::to_string(kMaxPlaceExperts));
  }
}

GroupControl* Placer::control(int own_rank, int peer) const {
  return static_cast<GroupControl*>(memory_.address(own_rank, peer));
}

RowSource* Placer::rows_of(int own_rank, int peer, std::span<const RankToPlace> ranks) const {
  if (row_inbox_) return row_inbox_(own_rank, peer);
  return ranks[static_cast<size_t>(peer)].tables.rows;
}

// All slots lead nowhere, and the placement is whole as long as nobody says otherwise.
void Placer::clear_rows(std::span<const RankToPlace> ranks) {
  for (const DeviceRanks& of : devices_) {
    const ScopedDevice scope(of.device);
    for (const size_t i : of.index) {
      cuda::check(driver().cuMemsetD8Async(device_pointer(ranks[i].tables.row_of_source), 0xff,
                                           static_cast<size_t>(ranks[i].sources + 1) * sizeof(int32_t),
                                           stream_of(ranks[of.index.front()].routing.stream)),
                  "clearing a table of rows");
    }
  }
}

void Placer::launch(const LayerShape& shape, std::span<const RankToPlace> ranks, uint32_t phases,
                    const PlaceLimits& limits) {
  if (timed_out_) throw_noticed_failure();
  if ((phases & kAssignPhase) != 0) clear_rows(ranks);
  for (const DeviceRanks& of : devices_) {
    const ScopedDevice scope(of.device);
    PlaceArguments args{};
    args.ranks = memory_.ranks();
    args.ctas = of.ctas;
    args.phases = phases;
    args.call = call_;
    args.terms = {static_cast<int32_t>(shape.experts), static_cast<int32_t>(shape.topk),
                  limits.rows > 0 ? limits.rows : kMaxRowCount, limits.tokens};
    args.wait_limit_ns = nanoseconds(wait_seconds_);
    args.arrival_limit_ns = nanoseconds(arrival_seconds_);
    PlaceRank* rank = args.rank;
    for (const size_t i : of.index) {
      const Routing& routing = ranks[i].routing;
      rank->topk_ids = routing.topk_ids;
      rank->probs = routing.probs;
      rank->rank = own_[i].rank;
      rank->tokens = static_cast<int32_t>(routing.tokens);
      rank->wide_ids = routing.index_type == IndexType::kInt64 ? 1 : 0;
      rank->dense = routing.routing_map != nullptr ? 1 : 0;
      rank->tables = ranks[i].tables;
      rank->state = own_[i].state;
      rank->chunk_counts = own_[i].chunk_counts;
      rank->chunk_tokens = own_[i].chunk_tokens;
      rank->call_failed = call_failed_ ? call_failed_(own_[i].rank) : nullptr;
      for (int peer = 0; peer < memory_.ranks(); ++peer) {
        rank->control[peer] = control(own_[i].rank, peer);
        if ((phases & kAssignPhase) != 0) rank->rows_of[peer] = rows_of(own_[i].rank, peer, ranks);
      }
      ++rank;
    }
    launch_kernel(of.place,
                  {.grid_x = static_cast<int>(of.index.size()) * of.ctas,
                   .threads = kPlaceThreads,
                   .shared_bytes = place_shared_bytes(shape.experts),
                   .cooperative = true,
                   .stream = stream_of(ranks[of.index.front()].routing.stream)},
                  &args, "placement");
  }
}

void Placer::make_slots(const LayerShape& shape, std::span<RankToPlace> ranks) {
  for (const DeviceRanks& of : devices_) {
    const ScopedDevice scope(of.device);
    for (const size_t i : of.index) {
      Routing& routing = ranks[i].routing;
      if (routing.routing_map == nullptr) continue;
      SlotsOfMapArguments args{routing.routing_map,
                               routing.probs,
                               ranks[i].slot_ids,
                               ranks[i].slot_probs,
                               static_cast<int32_t>(routing.tokens),
                               static_cast<int32_t>(shape.experts),
                               static_cast<int32_t>(shape.topk)};
      routing.topk_ids = ranks[i].slot_ids;
      routing.index_type = IndexType::kInt32;
      routing.probs = ranks[i].slot_probs;
      if (routing.tokens == 0) continue;
      launch_kernel(of.slots_of_map,
                    {.grid_x = dense_blocks(routing.tokens),
                     .threads = kDenseThreads,
                     .stream = stream_of(ranks[of.index.front()].routing.stream)},
                    &args, "the slots of a routing map");
    }
  }
}

void launch_dense_dprobs(KernelStore& kernels, DenseDprobsArguments args, CUstream stream) {
  if (args.tokens == 0) return;
  launch_kernel(kernels.get(dense_dprobs_request(), 0),
                {.grid_x = dense_blocks(args.tokens), .threads = kDenseThreads, .stream = stream}, &args,
                "dense dprobs");
}

void Placer::count(const LayerShape& shape, std::span<const RankToPlace> ranks) {
  launch(shape, ranks, kCountPhase, {});
}

void Placer::assign(const LayerShape& shape, std::span<const RankToPlace> ranks) {
  launch(shape, ranks, kAssignPhase, {});
}

void Placer::place(const LayerShape& shape, std::span<const RankToPlace> ranks, const PlaceLimits& limits) {
  launch(shape, ranks, kCountPhase | kAssignPhase, limits);
}

PlacementCounts Placer::read_counts(const LayerShape& shape, std::span<const RankToPlace> ranks) {
  const ScopedDevice scope(own_.front().device);
  const CUstream stream = stream_of(ranks.front().routing.stream);
  const size_t count = static_cast<size_t>(memory_.ranks());
  const size_t entries = count * static_cast<size_t>(shape.experts);
  cuda::check(driver().cuMemcpyDtoHAsync(host_->counts, device_pointer(ranks.front().tables.counts),
                                         entries * sizeof(int32_t), stream),
              "reading counts");
  cuda::check(driver().cuMemcpyDtoHAsync(host_->tokens, device_pointer(ranks.front().tables.tokens_of_rank),
                                         count * sizeof(int32_t), stream),
              "reading token counts");
  check(ranks);
  return {{host_->tokens, host_->tokens + count}, {host_->counts, host_->counts + entries}};
}

void Placer::invert_rows(const LayerShape& shape, std::span<const RankToPlace> ranks) {
  for (const DeviceRanks& of : devices_) {
    const ScopedDevice scope(of.device);
    const CUstream stream = stream_of(ranks[of.index.front()].routing.stream);
    RowOfSourceArguments args{};
    args.ranks = memory_.ranks();
    args.experts = static_cast<int32_t>(shape.experts);
    args.topk = static_cast<int32_t>(shape.topk);
    for (size_t place = 0; place < of.index.size(); ++place) {
      const size_t i = of.index[place];
      args.rank[place] = own_[i].rank;
      args.tables[place] = ranks[i].tables;
    }
    launch_kernel(
        of.row_of_source,
        {.grid_x = of.ctas, .grid_y = static_cast<int>(of.index.size()), .threads = kPlaceThreads, .stream = stream},
        &args, "inverting a table of rows");
  }
}

void Placer::build_programs(std::span<RankCall* const> calls, std::span<const ProgramTables> tables,
                            std::span<const Stream> streams) {
  for (const DeviceRanks& of : devices_) {
    const ScopedDevice scope(of.device);
    ProgramTablesArguments args{};
    args.calls = calls[of.index.front()];
    for (size_t place = 0; place < of.index.size(); ++place) args.tables[place] = tables[of.index[place]];
    launch_kernel(of.program_tables,
                  {.grid_x = static_cast<int>(of.index.size()),
                   .threads = kPlaceThreads,
                   .stream = stream_of(streams[of.index.front()])},
                  &args, "building a Program's tables");
  }
}

void Placer::queue_reports(std::span<const RankToPlace> ranks) {
  for (size_t i = 0; i < own_.size(); ++i) {
    const ScopedDevice scope(own_[i].device);
    cuda::check(driver().cuMemcpyDtoHAsync(&host_->report[i], device_pointer(&own_[i].state->report),
                                           sizeof(PlaceReport), stream_of(ranks[i].routing.stream)),
                "queueing the report of a placement");
  }
}

bool Placer::has_noticed_failure() const {
  if (timed_out_) return true;
  for (size_t i = 0; i < own_.size(); ++i) {
    const volatile PlaceFault& fault = host_->report[i].fault;
    if (fault != PlaceFault::kNone) return true;
  }
  return false;
}

void Placer::check(std::span<const RankToPlace> ranks) {
  queue_reports(ranks);
  for (size_t i = 0; i < own_.size(); ++i) {
    const ScopedDevice scope(own_[i].device);
    const CUstream stream = stream_of(ranks[i].routing.stream);
    if (wait_for_stream_) {
      wait_for_stream_(own_[i].device, stream);
    } else {
      cuda::check(driver().cuStreamSynchronize(stream), "placement");
    }
  }
  if (has_noticed_failure()) throw_noticed_failure();
}

void Placer::throw_noticed_failure() {
  if (timed_out_) {
    throw Error(Status::kTimeout, "group: an earlier placement failed half-way; call Group::recover() before the next");
  }
  if (own_.size() > 1) {  // the others may be about to say the same
    for (const DeviceRanks& of : devices_) {
      const ScopedDevice scope(of.device);
      cuda::check(driver().cuCtxSynchronize(), "placement");
    }
  }
  size_t first = 0;
  while (host_->report[first].fault == PlaceFault::kNone) ++first;
  PlaceReport report{};  // what the host has of it may be half of it still
  own_[first].stream.read(&report, &own_[first].state->report, sizeof(report));
  std::fill_n(host_->report, own_.size(), PlaceReport{});
  if (report.fault == PlaceFault::kNone) return;  // a copy of what was thrown before, which had been under way
  // No memset: SideStream::store().
  constexpr PlaceReport kCleared{};
  for (OwnRank& own : own_) own.stream.write(&own.state->report, &kCleared, sizeof(kCleared));
  timed_out_ = is_timeout(report.fault);
  RunningNote note{};
  if (report.fault == PlaceFault::kCountsMissing) {
    own_[first].stream.read(&note, &control(own_[first].rank, report.rank)->board.running, sizeof(note));
  }
  raise(report, own_[first].rank, running_text(report.rank, note));
}

}  // namespace uniep::cuda
