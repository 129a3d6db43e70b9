#include "engine/cuda/place/placed_tables.h"

#include <algorithm>
#include <cstring>

#include "engine/carver.h"
#include "engine/cuda/place/device_placement.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/side_stream.h"
#include "engine/cuda/runtime/stream_capture.h"
#include "model/placement.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

// Lays out tables in one block: first their sizes, then their contents and addresses.
class TableWriter {
 public:
  explicit TableWriter(std::byte* device) : device_(device), carver_(device) {}

  template <typename T>
  T* put(const T* values, std::size_t count) {
    const std::size_t offset = carver_.used();
    T* const address = carver_.take<T>(static_cast<int64_t>(count));
    if (device_ != nullptr) {
      image_.resize(carver_.used());
      if (count > 0) std::memcpy(image_.data() + offset, values, count * sizeof(T));
    }
    return address;
  }
  template <typename T>
  T* put(const std::vector<T>& values) {
    return put(values.data(), values.size());
  }
  std::size_t used() const { return carver_.used(); }
  const std::vector<std::byte>& image() const { return image_; }

 private:
  std::byte* device_;
  internal::Carver carver_;
  std::vector<std::byte> image_;
};

ProgramTables write_program(TableWriter& writer, const RankProgram& p) {
  const TableSizes s{.experts = p.experts, .ranks = p.ranks, .local_experts = p.local_experts};
  ProgramTables tables;
#define UNIEP_TABLE(type, name, entries) tables.name = writer.put(p.name, static_cast<std::size_t>(entries));
  UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
  return tables;
}

// Makes a block for what `write` writes, and uploads it.
template <typename Write>
auto upload_tables(BlockCache& cache, const RankTarget& target, std::vector<internal::MemoryBlock>& memory,
                   Write&& write) {
  TableWriter sizes(nullptr);
  write(sizes);
  memory.emplace_back(cache.allocator_of_one(), sizes.used(), target.rank, Stream{target.stream});
  TableWriter writer(memory.back().data());
  const auto tables = write(writer);
  target.uploads->copy(memory.back().data(), writer.image().data(), writer.image().size(), target.stream);
  return tables;
}

// Of one placement, and so of one shape.
bool same_program(const ProgramRequest& a, const ProgramRequest& b) {
  return a.schedule == b.schedule && a.direction == b.direction && a.redispatch == b.redispatch &&
         a.numerics == b.numerics && a.workers == b.workers && a.cluster == b.cluster && a.pull_parts == b.pull_parts &&
         a.part == b.part && a.weight_gradients == b.weight_gradients;
}

void point_to_device(RankProgram& p, const PlacementTables& placed, const ProgramTables& tables) {
#define UNIEP_TABLE(type, name, entries) p.name = placed.name;
  UNIEP_PLACEMENT_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
#define UNIEP_TABLE(type, name, entries) p.name = tables.name;
  UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
}

}  // namespace

int64_t row_table_bytes(const internal::PlacementState& placement) {
  const int64_t most = *std::max_element(placement.padded_rows.begin(), placement.padded_rows.end());
  return std::max(placement.capacity, most) * static_cast<int64_t>(sizeof(RowSource));
}

int64_t most_tokens(const internal::PlacementState& placement) {
  int64_t tokens = 0;
  for (const internal::RankPlacement& rank : placement.rank) tokens = std::max(tokens, rank.tokens);
  return tokens;
}

std::size_t input_bytes(const DeviceProgram& program, const LayerShape& shape) {
  return static_cast<std::size_t>(program.program.tokens * shape.hidden) * sizeof(BFloat16);
}

RankProgram program_on_host(const Program& program, int rank) {
  RankProgram p = program.rank(rank);
  if (!program.placement().counts_on_devices) return p;
  p.most_blocks = static_cast<int32_t>(program.placement().capacity / std::min(p.tile_m, kRowAlignment));
  return p;
}

PlacedTables::PlacedTables(std::vector<PlacementTables> tables, std::vector<internal::MemoryBlock> memory,
                           std::shared_ptr<BlockCache> cache, int device)
    : cache_(std::move(cache)), device_(device), memory_(std::move(memory)), tables_(std::move(tables)) {}

void PlacedTables::mark_placed(CUstream stream) {
  const ScopedDevice scope(device_);
  if (!is_captured(stream)) placed_.record(device_, stream);
}

internal::PlacementState PlacedTables::with_counts(const internal::PlacementState& placed) const {
  const ScopedDevice scope(device_);
  if (placed_) {
    placed_.wait();
  } else {
    check(driver().cuCtxSynchronize(), "waiting for a placement in a graph");
  }
  if (ask_) ask_();
  internal::PlacementState counted = placed;
  counted.counts_on_devices = false;
  std::vector<int32_t> tokens(counted.rank.size());
  SideStream stream(device_);
  stream.read(counted.counts.data(), tables_.front().counts, counted.counts.size() * sizeof(int32_t));
  stream.read(tokens.data(), tables_.front().tokens_of_rank, tokens.size() * sizeof(int32_t));
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) counted.rank[rank].tokens = tokens[rank];
  lay_out_rows(counted);
  return counted;
}

SignalLayout PlacedTables::layout(const ProgramRequest& request, const internal::PlacementState& placement, int rank) {
  for (const std::unique_ptr<Made>& made : made_) {
    if (same_program(made->request, request)) return made->programs.front().layout;
  }
  if (asked_ == nullptr || !same_program(asked_->request(), request)) {
    // It must not keep the placement alive, which keeps these tables.
    const std::shared_ptr<const internal::PlacementState> not_owned(std::shared_ptr<void>(), &placement);
    asked_ = std::make_unique<const Program>(request, not_owned);
  }
  return signal_layout(program_on_host(*asked_, rank));
}

const std::vector<DeviceProgram>& PlacedTables::programs(
    const ProgramRequest& request, const std::shared_ptr<const internal::PlacementState>& placement,
    const std::vector<RankTarget>& targets) {
  for (const std::unique_ptr<Made>& made : made_) {
    if (same_program(made->request, request)) return made->programs;
  }
  {
    const ScopedDevice scope(targets.front().device);
    if (is_captured(targets.front().stream) && !cache_->is_capturing()) {
      throw Error(Status::kInvalidArgument,
                  "placement: made by another Group, and the call goes into a CUDA graph; call place() with this one");
    }
  }
  if (asked_ == nullptr || !same_program(asked_->request(), request)) {
    asked_ = std::make_unique<const Program>(request, placement);
  }
  const std::unique_ptr<const Program> program = std::move(asked_);
  auto made = std::make_unique<Made>();
  made->request = request;
  for (std::size_t local = 0; local < targets.size(); ++local) {
    const RankTarget& target = targets[local];
    DeviceProgram own;
    own.program = program_on_host(*program, target.rank);
    own.layout = signal_layout(own.program);
    own.made_on_device = placement->counts_on_devices;
    if (own.made_on_device) {
      made->memory.push_back(internal::carved_block(
          cache_->allocator(), target.rank, Stream{target.stream},
          [&](internal::Carver& carver) { own.tables = carve_program(carver, request.shape, own.program.ranks); }));
    } else {
      const RankProgram on_host = own.program;
      own.tables = upload_tables(*cache_, target, made->memory,
                                 [&](TableWriter& writer) { return write_program(writer, on_host); });
    }
    point_to_device(own.program, tables_[local], own.tables);
    made->programs.push_back(own);
  }
  made_.push_back(std::move(made));
  return made_.back()->programs;
}

PlacedTables& tables_of(const internal::PlacementState& placement) {
  auto* const tables = dynamic_cast<PlacedTables*>(placement.engine_tables.get());
  if (tables == nullptr) throw Error(Status::kInvalidArgument, "placement: not made by a group of the cuda engine");
  return *tables;
}

}  // namespace uniep::cuda
