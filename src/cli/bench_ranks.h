#pragma once

#include <algorithm>
#include <vector>

#include "cli/bench_gpus.h"
#include "cli/bench_operation.h"
#include "cli/bytes_moved.h"

namespace uniep::cli {

// What a call sends over a GPU's NVLink and receives: of the GPU whose busier direction has most.
struct LinkBytes {
  double sent = 0.0;
  double received = 0.0;

  double most() const { return std::max(sent, received); }
  LinkBytes& operator+=(const LinkBytes& other) {
    sent += other.sent;
    received += other.received;
    return *this;
  }
};

// A result to be measured.
BenchResult named(const char* name, double flops, const LinkBytes& bytes);
// One launch a stage.
Schedule sequential_schedule(const Schedule& schedule);
// Of the results "layer", "sequential" and the one of its GEMMs alone, those that were measured.
void add_ratios(BenchReport& report, const char* gemms, const LinkBytes& bytes);

// The ranks of a measurement whose work is a Group's: this process's with their routing on their GPUs, and what the
// host knows of all of them.
class BenchRanks {
 public:
  explicit BenchRanks(const BenchRequest& request);

  Group& group() { return group_; }
  BenchGpus& gpus() { return gpus_; }
  const Placement& on_host() const { return on_host_; }
  const std::vector<Routing>& routings() const { return routings_; }  // of local ranks
  int first_local() const { return group_.first_local_rank(); }
  int end_local() const { return group_.first_local_rank() + group_.local_ranks(); }
  // The place among gpus() of a local rank's GPU.
  std::size_t gpu_of(int rank) const { return all_local() ? static_cast<std::size_t>(gpu_of_any(rank)) : 0; }
  // Of any rank, counted over all processes.
  int gpu_of_any(int rank) const { return rank % gpu_count(); }
  int gpu_count() const { return all_local() ? static_cast<int>(gpus_.count()) : group_.ranks(); }
  bool all_local() const { return group_.local_ranks() == group_.ranks(); }

  int64_t most_padded_rows() const;
  int64_t most_tokens() const;
  std::vector<int64_t> rows_per_rank() const;

  // Of the rank with most rows.
  double forward_flops() const;
  // What a pass brings to a GPU and takes from it; what virtual ranks of one GPU send each other stays there.
  LinkBytes link_bytes(const Schedule& schedule, const Numerics& numerics, Direction direction) const;
  MemoryNeed memory(const LayerConfig& config, const Schedule& schedule, Direction direction,
                    const Placement& placement) const;
  BenchReport empty_report() const;  // device and rows

  // What an exchange of so many bytes between ranks brings to a GPU and takes from it.
  struct Traffic {
    double received = 0.0;     // from its own ranks, too
    double from_others = 0.0;  // over its NVLink
    double sent_to_others = 0.0;
  };
  std::vector<Traffic> traffic(const ByteMatrix& bytes) const;  // of all GPUs

 private:
  const BenchRequest& request_;
  Group group_;
  BenchGpus gpus_;
  Placement on_host_;
  std::vector<Routing> routings_;
};

}  // namespace uniep::cli
