#include "engine/cuda/memory/symmetric_region.h"

#include <algorithm>

#include "comm/rank_mesh.h"
#include "model/row_table.h"

namespace uniep::cuda {
namespace {

constexpr int64_t kPieceAlignment = 4096;

int64_t piece(int64_t bytes) {
  return round_up(bytes, kPieceAlignment);
}

SymmetricNeed largest(const SymmetricNeed& a, const SymmetricNeed& b) {
  return {std::max(a.flags, b.flags), std::max(a.slots, b.slots), std::max(a.prob_slots, b.prob_slots),
          std::max(a.inputs, b.inputs), std::max(a.rows, b.rows)};
}

void clear(const SymmetricMemory& memory, int64_t bytes) {
  for (const int rank : memory.own_ranks()) {
    SideStream(memory.device(rank)).clear(memory.address(rank, rank), static_cast<std::size_t>(bytes));
  }
}

}  // namespace

SymmetricNeed most_of(const SymmetricNeed& a, const SymmetricNeed& b) {
  return {std::max(a.flags, b.flags), std::max(a.slots, b.slots), std::max(a.prob_slots, b.prob_slots),
          std::max(a.inputs, b.inputs), std::max(a.rows, b.rows)};
}

int64_t SymmetricNeed::total() const {
  return piece(flags) + piece(slots) + piece(prob_slots) + piece(inputs) + piece(rows);
}

SymmetricRegion::SymmetricRegion(Make make)
    : make_(std::move(make)),
      control_(make_(sizeof(GroupControl))),
      signals_(std::make_unique<Signals>(*control_, sizeof(GroupControl))) {
  control_->barrier();
}

bool SymmetricRegion::fits(const SymmetricNeed& need) const {
  return memory_ != nullptr && largest(need, capacity_).total() == capacity_.total();
}

// What depends on the routing changes from call to call: with room to spare it seldom has to grow. New memory is zero,
// so all flags in it are older than any epoch.
void SymmetricRegion::reserve(const SymmetricNeed& need) {
  if (fits(need)) return;
  SymmetricNeed wanted = largest(need, capacity_);
  if (need.flags > capacity_.flags) wanted.flags += need.flags / 4;
  if (need.rows > capacity_.rows) wanted.rows += need.rows / 4;
  if (memory_ != nullptr) {
    if (kept_) earlier_.push_back({std::move(memory_), piece(capacity_.flags)});
    memory_.reset();
    // A rank's memory is free once its last peer has let go of it, and the new one may need its room.
    if (RankMesh* const mesh = control_->mesh()) mesh->barrier();
  }
  capacity_ = {};
  kept_ = false;
  memory_ = make_(std::max(wanted.total(), kPieceAlignment));
  capacity_ = wanted;
}

void SymmetricRegion::release() noexcept {
  memory_.reset();
  earlier_.clear();
  signals_.reset();
  control_.reset();
  capacity_ = {};
}

int64_t SymmetricRegion::bytes() const {
  if (control_ == nullptr) return 0;
  int64_t bytes = control_->bytes() + (memory_ != nullptr ? memory_->bytes() : 0);
  for (const Kept& kept : earlier_) bytes += kept.memory->bytes();
  return bytes;
}

void SymmetricRegion::recover(const std::function<void()>& clear) {
  control_->barrier();  // nobody's kernel runs any more
  signals_->clear();
  clear_flags();
  clear();
  control_->barrier();
}

void SymmetricRegion::clear_flags() {
  if (memory_ != nullptr) uniep::cuda::clear(*memory_, piece(capacity_.flags));
  for (const Kept& kept : earlier_) uniep::cuda::clear(*kept.memory, kept.flags);
}

void SymmetricRegion::set_epoch(uint32_t epoch) {
  clear_flags();
  for (const int rank : control_->own_ranks()) {
    SideStream(control_->device(rank)).store(signals_->epoch(rank), epoch);
  }
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
RowSource* SymmetricRegion::rows(int own_rank, int peer) const {
  return at<RowSource>(own_rank, peer, capacity_.total() - piece(capacity_.rows));
}

}  // namespace uniep::cuda
