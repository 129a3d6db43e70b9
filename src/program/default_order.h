#pragma once

#include "uniep/schedule.h"
#include "uniep/shape.h"

namespace uniep {

// What open fields about the order of tiles become.
struct DefaultOrder {
  Interleave interleave;  // with fusion=layer; without it phased
  QueueKind queue;
  int experts_per_wave;
  int mixed_waves;  // mixed: as many waves if there are as many experts; 0: experts_per_wave decides there, too
  int raster;
  int column_chunks;
  WgradOrder wgrad = WgradOrder::kFill;  // where the rules allow it, else kFill
};

// The machine's row for the shape's class; see the table in default_order.cpp. Any shape has one, illegal ones too.
DefaultOrder default_order(const LayerShape& shape, const Machine& machine, Direction direction);

}  // namespace uniep
