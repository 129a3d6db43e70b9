#include "program/default_order.h"

#include "program/hopper_rates.h"

namespace uniep {
namespace {

// By measurement (docs/layer_tuning.md).
constexpr DefaultOrder kCpu{.interleave = Interleave::kMixed,
                            .queue = QueueKind::kStatic,
                            .experts_per_wave = 2,
                            .mixed_waves = 0,
                            .raster = 8,
                            .column_chunks = 1};
constexpr DefaultOrder kLinks{.interleave = Interleave::kMixed,
                              .queue = QueueKind::kDynamic,
                              .experts_per_wave = 16,
                              .mixed_waves = 16,
                              .raster = 8,
                              .column_chunks = 1};
constexpr DefaultOrder kGemms{.interleave = Interleave::kPhased,
                              .queue = QueueKind::kDynamic,
                              .experts_per_wave = 16,
                              .mixed_waves = 16,
                              .raster = 16,
                              .column_chunks = 4};

constexpr int kAllExperts = 65536;  // a rank has no more

// Whether I W / (W - 1) is below a bound.
bool is_narrow(const LayerShape& shape, int64_t ranks, int64_t bound) {
  return ranks > 1 && shape.intermediate * ranks < bound * (ranks - 1);
}

// Whether a GPU's NVLink is busy for about as long as its tensor cores.
bool is_bound_by_links(const LayerShape& shape, int64_t ranks) {
  return is_narrow(shape, ranks, ranks < program::kManyRanks ? program::kLinkBoundOfFew : program::kLinkBoundOfMany);
}

// The most chunks up to `most` that are whole column tiles, and not few.
int whole_chunks(int64_t hidden, int most) {
  constexpr int64_t kColumns = 1024;
  int chunks = most;
  while (chunks > 1 && (hidden / chunks < kColumns || hidden % (chunks * int64_t{256}) != 0)) chunks /= 2;
  return chunks;
}

}  // namespace

DefaultOrder default_order(const LayerShape& shape, const Machine& machine, Direction direction) {
  if (machine.engine != EngineKind::kCuda) return kCpu;
  DefaultOrder order = kGemms;
  if (is_bound_by_links(shape, machine.ranks)) order = kLinks;
  order.column_chunks = whole_chunks(shape.hidden, order.column_chunks);
  if (direction == Direction::kBackward) {
    order.interleave = Interleave::kPhased;
    order.experts_per_wave = kAllExperts;
    order.raster = kGemms.raster;
    order.column_chunks = 1;
    // The dgrads have forward's operations and bytes. Near the bound it is worth little, and beside main_grad nothing.
    if (is_narrow(shape, machine.ranks, program::kLinkBoundOfFew)) order.wgrad = WgradOrder::kMixed;
  }
  return order;
}

}  // namespace uniep
