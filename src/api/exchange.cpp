#include "uniep/exchange.h"

#include "api/check_call.h"
#include "engine/engine.h"

namespace uniep {

using api::check_array;
using api::check_call;
using api::collective;

namespace {

// Under a capacity the host need not know how many rows there are.
bool may_have_rows(const Placement& placement, int rank) {
  return placement.state()->capacity > 0 || placement.padded_rows(rank) > 0;
}

}  // namespace

void dispatch(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
              std::span<const DispatchArguments> arguments) {
  collective(group, [&] {
    check_call(group, {config, schedule, Direction::kForward, placement, Operation::kDispatch}, arguments.size());
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const int rank = group.first_local_rank() + static_cast<int>(i);
      check_array(arguments[i].x, "x", rank, placement.tokens(rank) > 0);
      check_array(arguments[i].rows, "rows", rank, may_have_rows(placement, rank));
    }
    group.implementation().dispatch({config, schedule, placement, arguments});
  });
}

void combine(Group& group, const LayerConfig& config, const Schedule& schedule, const Placement& placement,
             std::span<const CombineArguments> arguments) {
  collective(group, [&] {
    check_call(group, {config, schedule, Direction::kForward, placement, Operation::kCombine}, arguments.size());
    bool with_dprobs = false;
    for (const CombineArguments& own : arguments) with_dprobs |= own.row_dprobs != nullptr || own.dprobs != nullptr;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const int rank = group.first_local_rank() + static_cast<int>(i);
      const bool has_tokens = placement.tokens(rank) > 0, has_rows = may_have_rows(placement, rank);
      check_array(arguments[i].rows, "rows", rank, has_rows);
      check_array(arguments[i].y, "y", rank, has_tokens);
      check_array(arguments[i].row_dprobs, "row_dprobs", rank, with_dprobs && has_rows);
      check_array(arguments[i].dprobs, "dprobs", rank, with_dprobs && has_tokens);
    }
    group.implementation().combine({config, schedule, placement, arguments});
  });
}

}  // namespace uniep
