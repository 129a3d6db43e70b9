#include "cli/bytes_moved.h"

namespace uniep::cli {

BytesMoved bytes_moved(const Placement& placement, const Schedule& schedule, const Numerics& numerics) {
  const int ranks = placement.state()->ranks;
  const ByteMatrix none(ranks, std::vector<int64_t>(ranks));
  BytesMoved moved{none, none};
  ProgramRequest request{placement.state()->shape, numerics, schedule};
  const auto add_part = [&](ProgramPart part, const std::vector<ListKind>& lists, ByteMatrix& bytes) {
    request.part = part;
    const Program program(request, placement.state());
    for (int rank = 0; rank < ranks; ++rank) {
      for (const ListKind list : lists) add_moves(program, program.rank(rank), 0, list, bytes);
    }
  };
  add_part(ProgramPart::kDispatch, {ListKind::kDispatch}, moved.dispatch);
  add_part(ProgramPart::kCombine, {ListKind::kSend}, moved.combine);
  return moved;
}

}  // namespace uniep::cli
