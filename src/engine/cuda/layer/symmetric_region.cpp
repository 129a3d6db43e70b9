#include "engine/cuda/layer/symmetric_region.h"

#include <algorithm>

#include "model/row_table.h"

namespace uniep::cuda {
namespace {

constexpr int64_t kPieceAlignment = 4096;

int64_t piece(int64_t bytes) {
  return round_up(bytes, kPieceAlignment);
}

}  // namespace

int64_t SymmetricNeed::total() const {
  return piece(flags) + piece(slots) + piece(prob_slots) + piece(inputs) + piece(exchange);
}

void SymmetricRegion::reserve(const SymmetricNeed& need) {
  SymmetricNeed wanted;
  wanted.flags = std::max({need.flags, capacity_.flags, kPieceAlignment});
  wanted.slots = std::max(need.slots, capacity_.slots);
  wanted.prob_slots = std::max(need.prob_slots, capacity_.prob_slots);
  wanted.inputs = std::max(need.inputs, capacity_.inputs);
  wanted.exchange = std::max(need.exchange, capacity_.exchange);
  if (memory_ != nullptr && wanted.total() == capacity_.total()) return;
  signals_.reset();
  if (memory_ != nullptr) memory_->barrier();
  memory_.reset();
  capacity_ = {};
  memory_ = make_(wanted.total());
  capacity_ = wanted;
  signals_ = std::make_unique<Signals>(*memory_, piece(capacity_.flags));
}

BFloat16* SymmetricRegion::slots(int own_rank, int peer) const {
  return at<BFloat16>(own_rank, peer, piece(capacity_.flags));
}
float* SymmetricRegion::prob_slots(int own_rank, int peer) const {
  return at<float>(own_rank, peer, piece(capacity_.flags) + piece(capacity_.slots));
}
BFloat16* SymmetricRegion::inputs(int own_rank, int peer) const {
  return at<BFloat16>(own_rank, peer, piece(capacity_.flags) + piece(capacity_.slots) + piece(capacity_.prob_slots));
}
void* SymmetricRegion::exchange(int own_rank, int peer) const {
  return at<std::byte>(own_rank, peer, capacity_.total() - piece(capacity_.exchange));
}

}  // namespace uniep::cuda
