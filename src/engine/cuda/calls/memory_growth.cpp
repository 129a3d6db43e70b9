#include <fmt/format.h>

#include <span>

#include "engine/cuda/calls/call_memory.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "program/edges.h"

// How symmetric memory grows in a call: together on all ranks, or on none.
namespace uniep::cuda {

void CudaEngine::reserve(const SymmetricNeed& need, const std::function<std::string()>& call) {
  if (capture_ != 0 && !symmetric_.fits(need)) {
    throw Error(
        Status::kInvalidArgument,
        fmt::format("group: this call needs {} bytes of symmetric memory, more than all before it, and none can "
                    "be taken in a CUDA graph; make one call of this size first",
                    need.total()));
  }
  if (!symmetric_.fits(need)) {
    const RankMesh::OfCall of_call(ranks_.mesh().get(), call_number_);
    try {
      settle();  // an overflow that another rank has noticed, and so is not in the exchange
      if (in_processes()) agree(call(), {});
      symmetric_.reserve(need);
    } catch (const Error&) {
      exchange_ahead_ = false;  // the others know of it
      throw;
    }
  }
  exchange_ahead_ = false;
  if (capture_ != 0) symmetric_.keep();
}

std::string CudaEngine::text_of(const NamedCall& call) const {
  return call_text(bind_call(call, {}).description);
}

// Throws the same on all ranks, whose exchange of hosts goes on.
void CudaEngine::agree(const std::string& call, const Problem& problem) {
  try {
    const std::vector<std::vector<std::byte>> calls = ranks_.all_gather(std::as_bytes(std::span(call)));
    for (std::size_t rank = 1; rank < calls.size(); ++rank) {
      if (calls[rank] == calls[0]) continue;
      const auto text = [&](std::size_t of) {
        return std::string(reinterpret_cast<const char*>(calls[of].data()), calls[of].size());
      };
      throw Error(Status::kInvalidArgument,
                  fmt::format("rank 0 makes {}; rank {} makes {}; all ranks must make the same "
                              "calls in the same order",
                              text(0), rank, text(rank)));
    }
    ranks_.mesh()->agree(problem);
  } catch (const Error&) {
    agreed_ = ranks_.peer_failure().empty();
    throw;
  }
}

void CudaEngine::refuse_growth(const ProgramRequest& request, CallKind kind,
                               const internal::PlacementState& placement) {
  if (!in_processes() || !exchange_ahead_) return;
  const Problem problem = problem_in([] { throw; });
  if (problem.status == Status::kTimeout) return;  // the others know
  const SignalLayout layout = tables_of(placement).layout(request, placement, first_local_rank());
  if (!symmetric_.fits(symmetric_need(machine(), request, placement, layout, 0))) {
    const RankMesh::OfCall of_call(ranks_.mesh().get(), call_number_);
    try {
      agree(text_of({request, kind, placement}), problem);
    } catch (const Error&) {
      exchange_ahead_ = false;  // the others know of it
      throw;
    }
  }
  exchange_ahead_ = false;
}

}  // namespace uniep::cuda
