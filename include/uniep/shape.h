#pragma once

#include <cstdint>

namespace uniep {

// The sizes of one MoE layer, equal on all ranks. Legal: hidden and intermediate positive multiples of 8,
// 1 <= topk <= experts.
struct LayerShape {
  int64_t hidden = 0;        // H, columns of x and y
  int64_t intermediate = 0;  // I, columns of an expert's activation
  int64_t experts = 0;       // E, over all ranks; rank r holds the experts [r E / W, (r + 1) E / W)
  int64_t topk = 0;          // K, slots per token; a slot may stay unused
  bool operator==(const LayerShape&) const = default;
};

}  // namespace uniep
