#pragma once

#include "engine/cuda/device/arguments/place_arguments.h"
#include "engine/cuda/device/ptx/memory.h"

// One CTA's part in a placement: which slots are its own, what it keeps in shared memory, and its waits.
namespace uniep::cuda {

// Arrays of one number an expert, or a class of tokens. A warp's slots and tokens follow each other, and so do a CTA's.
struct PlaceShared {
  int32_t* warp_rows;    // [warps][E] slots of the warp; then how many of the CTA's come before them
  int32_t* first_row;    // [E] slots of the rank before the CTA's; then the row of the CTA's first
  int32_t* own_offset;   // [E] rows of earlier sources
  int32_t* expert_rows;  // [E] rows of all sources
  int32_t* segment;      // [E + 1] padded rows of all experts before, over all ranks
  int32_t* warp_tokens;  // [warps][kTokenClasses] tokens of the warp; then how many of the CTA's come before them
  int32_t* first_token;  // [kTokenClasses] where the CTA's first token of a class comes in the order

  UNIEP_DEVICE PlaceShared(int32_t* memory, int32_t experts)
      : warp_rows(memory),
        first_row(memory + kPlaceWarps * experts),
        own_offset(first_row + experts),
        expert_rows(own_offset + experts),
        segment(expert_rows + experts),
        warp_tokens(segment + experts + 1),
        first_token(warp_tokens + kPlaceWarps * kTokenClasses) {}
};

struct PlaceCta {
  const PlaceArguments& args;
  const PlaceRank& own;
  PlaceShared shared;
  int32_t index;  // in the rank
  uint32_t epoch;

  UNIEP_DEVICE int32_t local_experts() const { return args.terms.experts / args.ranks; }
  UNIEP_DEVICE uint32_t bank() const { return epoch & 1u; }
  UNIEP_DEVICE PlaceExchange& inbox() const { return own.control[own.rank]->place; }
  UNIEP_DEVICE int32_t* warp_rows() const { return shared.warp_rows + threadIdx.x / 32 * args.terms.experts; }
  UNIEP_DEVICE int32_t* warp_tokens() const { return shared.warp_tokens + threadIdx.x / 32 * kTokenClasses; }

  // First row of an expert's segment on its rank.
  UNIEP_DEVICE int32_t segment_start(int32_t expert) const {
    return shared.segment[expert] - shared.segment[expert / local_experts() * local_experts()];
  }
  UNIEP_DEVICE int32_t padded_rows(int32_t rank) const {
    return shared.segment[(rank + 1) * local_experts()] - shared.segment[rank * local_experts()];
  }
};

// A warp's slots or tokens: a run of the rank's, in whole lines of 32.
struct WarpRange {
  uint32_t begin, end;
};
UNIEP_DEVICE WarpRange range_of_warp(const PlaceCta& cta, uint32_t count) {
  const uint32_t warps = static_cast<uint32_t>(cta.args.ctas) * kPlaceWarps;
  const uint64_t share = (count + warps * 32 - 1) / (warps * 32) * 32;
  const uint64_t begin = (static_cast<uint32_t>(cta.index) * kPlaceWarps + threadIdx.x / 32) * share;
  const uint64_t end = begin + share;
  return {begin < count ? static_cast<uint32_t>(begin) : count, end < count ? static_cast<uint32_t>(end) : count};
}
UNIEP_DEVICE WarpRange slots_of_warp(const PlaceCta& cta) {
  return range_of_warp(cta, static_cast<uint32_t>(cta.own.tokens) * static_cast<uint32_t>(cta.args.terms.topk));
}

enum class WaitEnd { kReached, kLate, kPeerFailed };

// One thread. Waits until a counter or flag has come as far as `expected`, compared modulo 2^32. `given_up`, where not
// null, tells when nobody will bring it there in the call of this number.
UNIEP_DEVICE WaitEnd wait_until_reached(const uint32_t* word, uint32_t expected, uint64_t limit_ns,
                                        const CallsGivenUp* given_up, uint32_t call) {
  constexpr uint32_t kPause = 20;
  const auto reached = [&] { return static_cast<int32_t>(ptx::load_acquire_system(word) - expected) >= 0; };
  const uint64_t begin = ptx::nanoseconds();
  while (!reached()) {
    if (given_up != nullptr && takes_no_part(load_given_up(*given_up), call)) {
      return reached() ? WaitEnd::kReached : WaitEnd::kPeerFailed;
    }
    if (ptx::nanoseconds() - begin > limit_ns) return WaitEnd::kLate;
    __nanosleep(kPause);
  }
  return WaitEnd::kReached;
}

// One thread of the rank at a time may get here with a new failure; the first one stays.
UNIEP_DEVICE void report_failure(const PlaceCta& cta, const PlaceReport& report) {
  if (atomicCAS(reinterpret_cast<int32_t*>(&cta.own.state->report.fault), 0, static_cast<int32_t>(report.fault)) == 0) {
    PlaceReport& kept = cta.own.state->report;
    kept.routing_fault = report.routing_fault;
    kept.experts = cta.args.terms.experts;
    kept.topk = cta.args.terms.topk;
    kept.rank = report.rank;
    kept.expert = report.expert;
    kept.entry = report.entry;
    kept.id = report.id;
    kept.prob = report.prob;
    kept.dense = report.dense;
    kept.expert_rows = report.expert_rows;
    kept.rows = report.rows;
    kept.limit = report.limit;
    kept.terms = report.terms;
    kept.peers_terms = report.peers_terms;
  }
}

// One thread: the placement has failed on this rank, which tells the others when it publishes its rows.
UNIEP_DEVICE void give_up(const PlaceCta& cta) {
  atomicExch(&cta.own.state->gave_up, cta.epoch);
  if (cta.own.tables.whole != nullptr) atomicExch(cta.own.tables.whole, 0u);
}

// Whether an earlier placement or call of this rank has failed, so that the ranks go on only after recover(). What is
// queued behind it is not to wait a limit each.
UNIEP_DEVICE bool is_lost(const PlaceCta& cta) {
  const auto* const fault = reinterpret_cast<const uint32_t*>(&cta.own.state->report.fault);
  const uint32_t earlier = ptx::load_relaxed_gpu(fault);
  const bool call_failed = cta.own.call_failed != nullptr && ptx::load_relaxed_gpu(cta.own.call_failed) != 0;
  return call_failed || earlier >= static_cast<uint32_t>(PlaceFault::kCountsMissing);
}

// The ranks' flags of a step.
struct RankFlags {
  const uint32_t* flags;
  uint32_t expected;
  PlaceFault missing;
  uint64_t limit_ns;
};

// All threads: until every rank's flag has come as far as is expected. False where one does not, or where `gave_up`
// says of a flag that its rank gave up: then the placement has failed here.
template <typename GaveUp>
UNIEP_DEVICE bool wait_for_ranks(const PlaceCta& cta, const RankFlags& of, GaveUp&& gave_up) {
  bool failed = false;
  const int32_t peer = static_cast<int32_t>(threadIdx.x);
  if (peer < cta.args.ranks) {
    const CallBoard& board = cta.own.control[cta.own.rank]->board;
    const bool lost = is_lost(cta);
    const WaitEnd end =
        wait_until_reached(of.flags + peer, of.expected, lost ? 0 : of.limit_ns, &board.given_up[peer], cta.args.call);
    const bool peer_gave_up = end == WaitEnd::kReached && gave_up(ptx::load_acquire_system(of.flags + peer));
    failed = end != WaitEnd::kReached || peer_gave_up;
    if (failed) {
      PlaceReport report{};
      report.fault = peer_gave_up                  ? PlaceFault::kPeerGaveUp
                     : end == WaitEnd::kPeerFailed ? PlaceFault::kPeerFailed
                                                   : of.missing;
      report.rank = peer;
      if (!lost) report_failure(cta, report);  // what has failed before has a report
      give_up(cta);
    }
  }
  return __syncthreads_or(failed) == 0;
}

}  // namespace uniep::cuda
