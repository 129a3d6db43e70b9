#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tune/solve.h"

namespace uniep::tune {

// The values of solve(), by groups: a Schedule is one choice of each, where they go together.
struct GemmChoice {
  Fusion fusion;
  int experts_per_wave;
  Interleave interleave;
  int raster;
  QueueKind queue;
  int width;  // index into SolveSpace::widths
  int cluster;
  WgradOrder wgrad;
  GemmPart part;
};
struct DispatchChoice {
  DispatchTransport transport;
  bool dedup;
  CommWhere where;
  int sms;
  int chunk;  // index into SolveSpace::chunks
  DispatchPart part;
};
struct CombineChoice {
  CombineTransport transport;
  int column_chunks, combine_sms, reduce_sms;
  CombinePart part;
};

// Columns of tiles: of all, and of the first GEMM's where those are its own, else 0.
struct Width {
  int common, first;
};

// What a kernel of a width with rings of a chunk has room for.
struct Fit {
  bool fits = false;
  int stages = 0, ring = 0;
};

class SolveSpace {
 public:
  // Throws Error(kInvalidArgument) where the fixed values leave nothing.
  explicit SolveSpace(const SolveRequest& request);

  const Problem& problem() const { return problem_; }
  const Schedule& base() const { return base_; }
  uint64_t size() const { return size_; }

  // Calls visit(gemm, dispatch, combine) for every point; it returns false to end.
  template <typename Visit>
  bool for_each(Visit&& visit) const {
    for (const GemmChoice& gemm : gemms_) {
      for (const DispatchChoice& dispatch : dispatches_) {
        if (!fit(gemm, dispatch).fits) continue;
        for (const CombineChoice& combine : combines(gemm, dispatch)) {
          if (goes_together(gemm, dispatch, combine) && !visit(gemm, dispatch, combine)) return false;
        }
      }
    }
    return true;
  }

  // The Schedule of a point.
  Schedule schedule(const GemmChoice& gemm, const DispatchChoice& dispatch, const CombineChoice& combine) const;

  // A field's values, "field: value, value".
  const std::vector<std::string>& values() const { return values_; }
  // The varied fields with all their values.
  const std::vector<std::pair<int, std::vector<int>>>& fields() const { return fields_; }

 private:
  std::vector<int> allowed(int field, std::vector<int> values);
  const Fit& fit(const GemmChoice& gemm, const DispatchChoice& dispatch) const {
    return fits_[index(gemm.width, dispatch.chunk, dispatch.where) * kKernelKinds + kind_of(gemm)];
  }
  const std::vector<CombineChoice>& combines(const GemmChoice& gemm, const DispatchChoice& dispatch) const {
    return combines_[index(gemm.width, dispatch.chunk, dispatch.where)];
  }
  std::size_t index(int width, int chunk, CommWhere where) const {
    return (static_cast<std::size_t>(width) * chunks_.size() + chunk) * 2 + static_cast<std::size_t>(where);
  }
  // Kernels of which the rules differ: by what runs in one, by clusters and by queues.
  static constexpr int kKernelKinds = 16;
  static int kind_of(const GemmChoice& gemm) {
    const bool layer = gemm.fusion == Fusion::kLayer, fills = gemm.wgrad != WgradOrder::kAfter;
    const bool is_static = gemm.queue == QueueKind::kStatic;
    return (is_static ? 8 : 0) + (layer ? 4 : 0) + (fills ? 2 : 0) + gemm.cluster - 1;
  }
  bool goes_together(const GemmChoice& gemm, const DispatchChoice& dispatch, const CombineChoice& combine) const {
    if (dispatch.where == CommWhere::kWarps) return true;
    const int taken = combine.combine_sms + combine.reduce_sms, copying = dispatch.sms + base_.comm.relay_sms;
    if (gemm.cluster == 2 && (dispatch.sms % 2 != 0 || base_.comm.relay_sms % 2 != 0 || combine.combine_sms % 2 != 0 ||
                              combine.reduce_sms % 2 != 0)) {
      return false;
    }
    return taken < available_ && copying <= available_ - taken;
  }
  void list_values(int density);
  void find_fits(const SolveRequest& request);
  // A launch a stage leaves nothing to fill.
  bool may_fill(const GemmChoice& gemm) const {
    return !backward_ || gemm.fusion != Fusion::kNone || gemm.wgrad == WgradOrder::kAfter;
  }
  template <typename List>
  void for_each_order(List&& list) const;
  void set_gemms(Schedule& schedule, const GemmChoice& gemm) const;
  void list_gemms();
  void list_dispatches();
  void list_combines();
  uint64_t count() const;

  const PartialSchedule fixed_;
  const bool backward_;
  Problem problem_;
  Schedule base_;
  int local_experts_ = 1;
  int available_ = 1;
  std::vector<Width> widths_;
  std::vector<int> wgrads_, chunks_, clusters_, fusions_, waves_, interleaves_, rasters_, queues_, transports_, dedups_,
      wheres_, dispatch_sms_, combine_sms_, reduce_sms_, combine_transports_, column_chunks_;
  std::vector<Fit> fits_;
  std::vector<GemmChoice> gemms_;
  std::vector<DispatchChoice> dispatches_;
  std::vector<std::vector<CombineChoice>> combines_;
  uint64_t size_ = 0;
  std::vector<std::string> values_;
  std::vector<std::pair<int, std::vector<int>>> fields_;
};

}  // namespace uniep::tune
