#pragma once

#include <string>

#include "model/dense_routing.h"
#include "model/routing_check.h"
#include "model/row_table.h"
#include "uniep/error.h"

// What is said of routings that can not be placed, by both engines.
namespace uniep {

struct SlotProblem {
  RoutingFault fault = RoutingFault::kNone;
  int rank = 0;
  int64_t token = 0, slot = 0;
  int64_t id = 0;
  float prob = 0.0f;
  bool dense = false;  // the slots are those of a map
};

[[noreturn]] inline void refuse_dense(const SlotProblem& problem, int64_t topk) {
  const std::string where = "rank " + std::to_string(problem.rank) + ", token " + std::to_string(problem.token);
  if (problem.fault == RoutingFault::kProbNotFinite) {
    throw Error(Status::kInvalidArgument, "probs: " + where + ", expert " + std::to_string(problem.id) + " is " +
                                              std::to_string(problem.prob) + "; probs must be finite");
  }
  throw Error(Status::kInvalidArgument, "routing_map: " + where + " has " +
                                            std::to_string(experts_of_token(problem.id)) +
                                            " experts; a token has at most topk, " + std::to_string(topk));
}

[[noreturn]] inline void refuse_slot(const SlotProblem& problem, int64_t experts, int64_t topk) {
  if (problem.dense) refuse_dense(problem, topk);
  const std::string where = "rank " + std::to_string(problem.rank) + ", token " + std::to_string(problem.token) +
                            ", slot " + std::to_string(problem.slot);
  switch (problem.fault) {
    case RoutingFault::kIdOutOfRange:
      throw Error(Status::kInvalidArgument, "topk_ids: " + where + " holds " + std::to_string(problem.id) +
                                                "; legal are 0 to " + std::to_string(experts - 1) +
                                                " and -1 for an unused slot");
    case RoutingFault::kExpertTwice:
      throw Error(Status::kInvalidArgument, "topk_ids: " + where + " names expert " + std::to_string(problem.id) +
                                                " a second time; a token's experts must differ");
    default:
      throw Error(Status::kInvalidArgument,
                  "probs: " + where + " is " + std::to_string(problem.prob) + "; probs must be finite");
  }
}

// Too many rows for a rank; `expert` is the first that does not fit.
struct RowOverflow {
  int rank = 0;
  int64_t padded_rows = 0, limit = 0;
  int32_t expert = 0, expert_rows = 0;
};

[[noreturn]] inline void refuse_rows(const RowOverflow& overflow) {
  throw Error(Status::kOverflow,
              "capacity: rank " + std::to_string(overflow.rank) + " needs " + std::to_string(overflow.padded_rows) +
                  " rows (padded to " + std::to_string(kRowAlignment) + " an expert) but has " +
                  std::to_string(overflow.limit) + "; expert " + std::to_string(overflow.expert) + " with " +
                  std::to_string(overflow.expert_rows) + " rows is the first that does not fit");
}

}  // namespace uniep
