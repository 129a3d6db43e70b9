#pragma once

#include <cuda.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>

#include "comm/symmetric_memory.h"
#include "engine/cuda/place/device_placement.h"
#include "model/place.h"
#include "model/placement_state.h"
#include "tests/cuda/gpu_support.h"

// Random routings of all ranks, their placement on the GPU, and what the host makes of them.
namespace uniep::cuda::test {

enum class Spread { kUniform, kSkewed, kSameExperts };

struct PlaceCase {
  std::string name;
  int64_t experts = 8, topk = 2;
  std::vector<int64_t> tokens;  // a rank
  Spread spread = Spread::kUniform;
  bool wide = false;
  double unused = 0;  // share of the slots
};

struct HostRouting {
  std::vector<int64_t> ids;
  std::vector<int32_t> narrow_ids;
  std::vector<float> probs;
};

inline HostRouting random_routing(const PlaceCase& c, int rank, std::mt19937_64& random) {
  HostRouting routing;
  std::vector<int64_t> order(static_cast<size_t>(c.experts));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  const auto share = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  for (int64_t token = 0; token < c.tokens[static_cast<size_t>(rank)]; ++token) {
    for (int64_t slot = 0; slot < c.topk; ++slot) {
      if (c.spread != Spread::kSameExperts) {
        const double u = c.spread == Spread::kSkewed ? share() * share() * share() : share();
        const auto other = slot + static_cast<int64_t>(u * static_cast<double>(c.experts - slot));
        std::swap(order[static_cast<size_t>(slot)], order[static_cast<size_t>(other)]);
      }
      routing.ids.push_back(share() < c.unused ? -1 : order[static_cast<size_t>(slot)]);
      routing.probs.push_back(static_cast<float>(share()));
    }
    if (c.spread == Spread::kSkewed) std::sort(order.begin(), order.end());
  }
  routing.narrow_ids.assign(routing.ids.begin(), routing.ids.end());
  return routing;
}

// What placements need of each GPU.
class PlaceDevices {
 public:
  KernelStore& kernels(int device) { return *of(device).kernels; }
  CUstream stream(int device) { return of(device).stream; }
  ~PlaceDevices() {
    for (const auto& [device, own] : devices_) {
      const ScopedDevice scope(device);
      driver().cuStreamDestroy(own.stream);
    }
  }

 private:
  struct Device {
    std::unique_ptr<KernelStore> kernels;
    CUstream stream = nullptr;
  };
  Device& of(int device) {
    Device& own = devices_[device];
    if (own.kernels == nullptr) {
      const ScopedDevice scope(device);
      own.kernels = std::make_unique<KernelStore>(device);
      check(driver().cuStreamCreate(&own.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    }
    return own;
  }
  std::map<int, Device> devices_;
};

// One rank of a group, which this process drives apart from the others.
class HalfMemory final : public SymmetricMemory {
 public:
  HalfMemory(SymmetricMemory& whole, int rank) : whole_(whole), own_{rank} {}
  int ranks() const override { return whole_.ranks(); }
  int64_t bytes() const override { return whole_.bytes(); }
  const std::vector<int>& own_ranks() const override { return own_; }
  int device(int own_rank) const override { return whole_.device(own_rank); }
  void* address(int own_rank, int peer) const override { return whole_.address(own_rank, peer); }
  void barrier() override { whole_.barrier(); }

 private:
  SymmetricMemory& whole_;
  std::vector<int> own_;
};

// All ranks' tables of one placement, with memory for `rows` rows a rank.
struct PlacedOnDevice {
  std::vector<RankToPlace> ranks;
  std::vector<ProgramTables> programs;
  std::vector<Buffer> memory;
};

class PlaceGroup {
 public:
  // Rank r runs on devices[r]. `copies`: peers write into symmetric memory of `row_bytes`, and each placement copies
  // from it.
  PlaceGroup(std::vector<int> devices, PlaceDevices& gpus, bool copies, int64_t row_bytes = 0)
      : devices_(std::move(devices)), gpus_(gpus) {
    memory_ = make_local_symmetric_memory(devices_, Placer::symmetric_bytes());
    std::vector<KernelStore*> kernels;
    for (const int device : devices_) kernels.push_back(&gpus.kernels(device));
    placer_ = std::make_unique<Placer>(*memory_, kernels, 5, 5);
    if (!copies) return;
    inbox_ = make_local_symmetric_memory(devices_, std::max<int64_t>(row_bytes, 16));
    placer_->set_row_inbox(inbox());
  }

  Placer& placer() { return *placer_; }
  SymmetricMemory& memory() { return *memory_; }
  Placer::RowInbox inbox() const {
    return [this](int own_rank, int peer) { return static_cast<RowSource*>(inbox_->address(own_rank, peer)); };
  }
  CUstream stream() { return gpus_.stream(devices_.front()); }
  const std::vector<int>& devices() const { return devices_; }

  void upload(const PlaceCase& c, const std::vector<HostRouting>& routings, PlacedOnDevice& placed) {
    const LayerShape shape = shape_of(c);
    for (int rank = 0; rank < ranks(); ++rank) {
      const int device = devices_[static_cast<size_t>(rank)];
      const ScopedDevice scope(device);
      const HostRouting& routing = routings[static_cast<size_t>(rank)];
      Buffer ids(static_cast<int64_t>(routing.ids.size()) * 8);
      Buffer probs(static_cast<int64_t>(routing.probs.size()) * 4);
      if (c.wide) {
        ids.upload(routing.ids);
      } else {
        ids.upload(routing.narrow_ids);
      }
      probs.upload(routing.probs);
      RankToPlace& own = placed.ranks.emplace_back();
      own.routing = {c.tokens[static_cast<size_t>(rank)], ids.as<void>(),
                     c.wide ? IndexType::kInt64 : IndexType::kInt32, probs.as<float>(), Stream{gpus_.stream(device)}};
      placed.memory.push_back(std::move(ids));
      placed.memory.push_back(std::move(probs));
      const auto carve = [&](std::byte* block) {
        internal::Carver carver(block);
        own.tables = carve_placement(carver, shape, ranks(), own.routing.tokens);
        const ProgramTables tables = carve_program(carver, shape, ranks());
        if (block != nullptr) placed.programs.push_back(tables);
        return static_cast<int64_t>(carver.used());
      };
      placed.memory.emplace_back(carve(nullptr));
      placed.memory.back().set_bytes(0xee);
      carve(placed.memory.back().as<std::byte>());
    }
  }

  void take_rows(PlacedOnDevice& placed, const std::vector<int64_t>& rows, int64_t sources) {
    for (int rank = 0; rank < ranks(); ++rank) {
      const ScopedDevice scope(devices_[static_cast<size_t>(rank)]);
      RankToPlace& own = placed.ranks[static_cast<size_t>(rank)];
      const auto carve = [&](std::byte* block) {
        internal::Carver carver(block);
        carve_rows(carver, own.tables, rows[static_cast<size_t>(rank)], sources);
        return static_cast<int64_t>(carver.used());
      };
      own.sources = sources;
      placed.memory.emplace_back(carve(nullptr));
      placed.memory.back().set_bytes(0xee);
      carve(placed.memory.back().as<std::byte>());
      check(driver().cuCtxSynchronize(), "poisoning");
    }
  }

  static LayerShape shape_of(const PlaceCase& c) {
    LayerShape shape;
    shape.experts = c.experts;
    shape.topk = c.topk;
    shape.hidden = 512;
    shape.intermediate = 256;
    return shape;
  }

 private:
  int ranks() const { return static_cast<int>(devices_.size()); }

  std::vector<int> devices_;
  PlaceDevices& gpus_;
  std::unique_ptr<SymmetricMemory> memory_, inbox_;
  std::unique_ptr<Placer> placer_;
};

inline std::vector<Routing> host_views(const PlaceCase& c, const std::vector<HostRouting>& routings) {
  std::vector<Routing> views;
  for (size_t rank = 0; rank < routings.size(); ++rank) {
    views.push_back({c.tokens[rank],
                     c.wide ? static_cast<const void*>(routings[rank].ids.data()) : routings[rank].narrow_ids.data(),
                     c.wide ? IndexType::kInt64 : IndexType::kInt32,
                     routings[rank].probs.data(),
                     {}});
  }
  return views;
}

// UNIEP_SOURCE_TABLES of a rank, which a host does without.
struct SourceTables {
  std::vector<int64_t> source_begin{0};
  std::vector<int32_t> row_of_source;

  SourceTables(const internal::PlacementState& host, size_t rank) {
    for (const internal::RankPlacement& source : host.rank) {
      for (size_t entry = 0; entry < source.expert_of_slot.size(); ++entry) {
        const int32_t expert = source.expert_of_slot[entry];
        const bool here = expert >= 0 && host.rank_of_expert[static_cast<size_t>(expert)] == static_cast<int>(rank);
        row_of_source.push_back(here ? source.row_of_slot[entry] : -1);
      }
      source_begin.push_back(static_cast<int64_t>(row_of_source.size()));
    }
  }
};

// Names of the tables that differ; empty when every byte is equal.
class TableComparison {
 public:
  template <typename T>
  void expect(const std::string& name, const T* device, const T* host, size_t count) {
    std::vector<T> seen(count);
    check(driver().cuMemcpyDtoHAsync(seen.data(), reinterpret_cast<CUdeviceptr>(device), count * sizeof(T), nullptr),
          "reading a table");
    check(driver().cuCtxSynchronize(), "reading a table");
    if (count == 0 || std::memcmp(seen.data(), host, count * sizeof(T)) == 0) return;
    size_t at = 0;
    while (std::memcmp(&seen[at], &host[at], sizeof(T)) == 0) ++at;
    different += " " + name + "[" + std::to_string(at) + "]";
  }
  template <typename T>
  void expect(const std::string& name, const T* device, const std::vector<T>& host) {
    expect(name, device, host.data(), host.size());
  }

  void expect_placement(const internal::PlacementState& host, const std::vector<RankToPlace>& placed,
                        bool with_row_of_source) {
    for (size_t rank = 0; rank < placed.size(); ++rank)
      expect_rank(host, rank, placed[rank].tables, with_row_of_source);
  }

  void expect_rank(const internal::PlacementState& host, size_t rank, const PlacementTables& tables,
                   bool with_row_of_source) {
    const internal::RankPlacement& own = host.rank[rank];
    const std::string at = "rank" + std::to_string(rank) + ".";
#define UNIEP_TABLE(type, name, entries) expect(at + #name, tables.name, host.name);
    UNIEP_EXPERT_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
#define UNIEP_TABLE(type, name, entries) expect(at + #name, tables.name, own.name);
    UNIEP_SLOT_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
    const SourceTables sources(host, rank);
    expect(at + "source_begin", tables.source_begin, sources.source_begin);
    if (with_row_of_source) expect(at + "row_of_source", tables.row_of_source, sources.row_of_source);
  }

  std::string different;
};

}  // namespace uniep::cuda::test
