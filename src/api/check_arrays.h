#pragma once

#include "uniep/layer.h"

// That a rank's arrays are there, of all local experts or of each. Throws Error(kInvalidArgument).
namespace uniep::api {

// With b2, which forward and backward read; b1 is forward's alone.
void check_weights(const Weights& weights, const LayerConfig& config, int rank, int64_t local_experts);
void check_b1(const Weights& weights, const LayerConfig& config, int rank, int64_t local_experts);
// With db1 and db2.
void check_dw1(const WeightGradients& gradients, const LayerConfig& config, int rank, int64_t local_experts);
void check_dw2(const WeightGradients& gradients, const LayerConfig& config, int rank, int64_t local_experts);
void check_routing(const Routing& routing, int rank);

}  // namespace uniep::api
