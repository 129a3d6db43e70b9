#include "engine/cuda/calls/lent_slices.h"

#include <algorithm>

namespace uniep::cuda {
namespace {

// A CTA that takes another's place fills its pipeline anew, some 10 us; who waits for its SM waits for a slice.
constexpr int64_t kShortestNs = 400'000;
constexpr int64_t kMostSlices = 24;   // CTAs that begin when the launch is over take 1 us of it for each 132
constexpr double kFlopsPerNs = 5000;  // of an SM, in long layers
constexpr double kLonger = 1.5;

double flops(const program::RankProgram& p, const program::LaunchStages& stages) {
  const double rows = static_cast<double>(p.tokens) * p.topk;  // where routing is uniform
  const double w1 = static_cast<double>(p.wgrad_fc1.rows) * p.wgrad_fc1.columns;
  const double w2 = static_cast<double>(p.wgrad_fc2.rows) * p.wgrad_fc2.columns;
  const bool forward = p.direction == Direction::kForward;
  double values = 0;
  if (stages.first_gemm) values += forward ? w1 : w2;
  if (stages.second_gemm) values += forward ? w2 : w1;
  if (stages.wgrad_fc2) values += w2;
  if (stages.wgrad_fc1) values += w1;
  return 2 * rows * values;
}

}  // namespace

LentSlices lent_slices(const program::RankProgram& program, const program::LaunchStages& stages, int64_t shortest_ns) {
  if (program.lent_workers == 0) return {};
  const int64_t shortest = shortest_ns > 0 ? shortest_ns : kShortestNs;
  const auto ns = static_cast<int64_t>(kLonger * flops(program, stages) / (kFlopsPerNs * program.workers));
  const int64_t slice = std::max(shortest, ns / kMostSlices);
  return {slice, static_cast<int32_t>(ns / slice) * program.lent_workers};
}

}  // namespace uniep::cuda
