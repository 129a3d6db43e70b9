#pragma once

#include "engine/cuda/device/place/block_sum.h"
#include "engine/cuda/device/place/cta.h"
#include "program/rank_program.h"

// From the counts of all sources to segments and offsets. Every CTA computes them for itself and so comes to the same
// decisions; the rank's CTAs share the work of writing them down.
namespace uniep::cuda {

// All threads. An empty placement counts every slot as unused.
UNIEP_DEVICE void lay_out(const PlaceCta& cta, bool empty) {
  __shared__ int32_t warp_sums[kPlaceWarps];
  const int32_t experts = cta.args.terms.experts;
  int32_t padded_before = 0;
  for (int32_t base = 0; base < experts; base += kPlaceThreads) {
    const int32_t expert = base + static_cast<int32_t>(threadIdx.x);
    int32_t rows = 0;
    if (expert < experts && !empty) {
      for (int32_t source = 0; source < cta.args.ranks; ++source) {
        if (source == cta.own.rank) cta.shared.own_offset[expert] = rows;
        rows += cta.inbox().counts[cta.bank()][source][expert];
      }
    }
    int32_t all;
    const int32_t before = exclusive_sum(static_cast<int32_t>(round_up(rows, kRowAlignment)), warp_sums, all);
    if (expert < experts) {
      cta.shared.expert_rows[expert] = rows;
      cta.shared.segment[expert] = padded_before + before;
    }
    padded_before += all;
  }
  if (threadIdx.x == 0) cta.shared.segment[experts] = padded_before;
  __syncthreads();
}

// All threads come to the same answer, the first rank in whose eyes another differs; then the placement has failed
// here, and in that rank's eyes too.
UNIEP_DEVICE bool has_other_arguments(const PlaceCta& cta) {
  for (int32_t source = 0; source < cta.args.ranks; ++source) {
    const SourceHeader& header = cta.inbox().header[cta.bank()][source];
    if (is_same(header.terms, cta.args.terms)) continue;
    if (threadIdx.x == 0) {
      PlaceReport report{};
      report.fault = PlaceFault::kOtherArguments;
      report.rank = source;
      report.terms = cta.args.terms;
      report.peers_terms = header.terms;
      report_failure(cta, report);
      give_up(cta);
    }
    return true;
  }
  return false;
}

// All threads come to the same answer; the first CTA writes it down.
UNIEP_DEVICE bool has_routing_problem(const PlaceCta& cta) {
  for (int32_t source = 0; source < cta.args.ranks; ++source) {
    const SourceHeader& header = cta.inbox().header[cta.bank()][source];
    if (header.problem == 0) continue;
    if (cta.index == 0 && threadIdx.x == 0) {
      PlaceReport report{};
      report.fault = PlaceFault::kRouting;
      report.routing_fault = problem_fault(header.problem);
      report.rank = source;
      report.entry = problem_entry(header.problem);
      report.id = header.id;
      report.prob = header.prob;
      report.dense = header.dense;
      report_failure(cta, report);
    }
    return true;
  }
  return false;
}

// As above; behind lay_out().
UNIEP_DEVICE bool overflows(const PlaceCta& cta) {
  for (int32_t rank = 0; rank < cta.args.ranks; ++rank) {
    if (cta.padded_rows(rank) <= cta.args.terms.row_limit) continue;
    if (cta.index == 0 && threadIdx.x == 0) {
      int32_t expert = rank * cta.local_experts();
      while (cta.shared.segment[expert + 1] - cta.shared.segment[rank * cta.local_experts()] <=
             cta.args.terms.row_limit) {
        ++expert;
      }
      PlaceReport report{};
      report.fault = PlaceFault::kOverflow;
      report.rank = rank;
      report.expert = expert;
      report.expert_rows = cta.shared.expert_rows[expert];
      report.rows = cta.padded_rows(rank);
      report.limit = cta.args.terms.row_limit;
      report_failure(cta, report);
    }
    return true;
  }
  return false;
}

// The rank's CTAs share the sources; the first CTA writes what there is one of.
UNIEP_DEVICE void write_tables(const PlaceCta& cta, bool empty, bool headers_came) {
  const PlacementTables& tables = cta.own.tables;
  const int32_t experts = cta.args.terms.experts, ranks = cta.args.ranks;
  for (int32_t source = cta.index; source < ranks; source += cta.args.ctas) {
    for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < experts; expert += kPlaceThreads) {
      int32_t offset = 0;
      for (int32_t earlier = 0; earlier < source && !empty; ++earlier) {
        offset += cta.inbox().counts[cta.bank()][earlier][expert];
      }
      tables.counts[source * experts + expert] = empty ? 0 : cta.inbox().counts[cta.bank()][source][expert];
      tables.source_offset[source * experts + expert] = offset;
    }
  }
  if (cta.index != cta.args.ctas - 1) return;
  for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < experts; expert += kPlaceThreads) {
    tables.rank_of_expert[expert] = expert / cta.local_experts();
    tables.expert_rows[expert] = cta.shared.expert_rows[expert];
    tables.segment_start[expert] = cta.segment_start(expert);
  }
  if (threadIdx.x != 0) return;
  tables.token_block_begin[0] = 0;
  tables.source_begin[0] = 0;
  for (int32_t source = 0; source < ranks; ++source) {
    const int64_t told = headers_came ? cta.inbox().header[cta.bank()][source].tokens : 0;
    const int64_t tokens = source == cta.own.rank ? cta.own.tokens : told;
    tables.tokens_of_rank[source] = static_cast<int32_t>(tokens);
    tables.token_block_begin[source + 1] =
        tables.token_block_begin[source] + static_cast<int32_t>(divide_up(tokens, kTokenBlock));
    tables.source_begin[source + 1] = tables.source_begin[source] + tokens * cta.args.terms.topk;
  }
}

}  // namespace uniep::cuda
