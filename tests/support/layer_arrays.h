#pragma once

#include <vector>

#include "support/random_layer.h"

namespace uniep::test {

// The arguments of a layer on the cpu engine, as a caller of the library holds them, and room for the results.
// `layer` must outlive it.
struct LayerArrays {
  explicit LayerArrays(const RandomLayer& layer);

  std::vector<ForwardArguments> forward_arguments();
  // With addresses for the weight gradients only where they are made now, and x only where weight gradients or, as it
  // recomputes it, z may need it.
  std::vector<BackwardArguments> backward_arguments(WeightGradientTime time, bool last_use, bool recomputes = false);
  std::vector<WeightGradientArguments> weight_gradient_arguments(bool dw1 = true, bool dw2 = true);

  // As before a call: rubbish in what is written, start_main_grad() in what may be added to.
  void reset();
  void gather_z(const Saved& saved);
  // What the layer gives in a sequential run on one rank, but weight gradients as reset() leaves them where the experts
  // are frozen, and z only where it was gathered.
  cli::LayerResult expected(WeightGradientTime time) const;

  const RandomLayer& source;
  std::vector<Routing> routings;
  cli::LayerResult result;

 private:
  WeightGradients gradients(int rank);
};

}  // namespace uniep::test
