#pragma once

#include <memory>
#include <string>
#include <vector>

#include "support/random_layer.h"
#include "uniep/c_api.h"

namespace uniep::test {

template <auto Destroy>
struct Destroyer {
  template <typename Handle>
  void operator()(Handle* handle) const {
    Destroy(handle);
  }
};
using GroupHandle = std::unique_ptr<uniep_group, Destroyer<uniep_group_destroy>>;
using PlacementHandle = std::unique_ptr<uniep_placement, Destroyer<uniep_placement_destroy>>;
using SavedHandle = std::unique_ptr<uniep_saved, Destroyer<uniep_saved_destroy>>;
using PendingHandle = std::unique_ptr<uniep_pending, Destroyer<uniep_pending_destroy>>;

void expect_failure(uniep_status status, const std::string& text, uniep_status got);
void expect_ok(uniep_status got);

uniep_group_options group_options(int ranks, int workers = 2);  // on the cpu engine
GroupHandle make_group(const uniep_group_options& options);

// A layer as a C caller holds it, with room for all results. Arguments point to its weights and gradients, so that it
// stays where it is.
struct CLayer {
  explicit CLayer(const RandomLayer& layer);
  CLayer(const CLayer&) = delete;
  CLayer& operator=(const CLayer&) = delete;

  PlacementHandle place(uniep_group* group) const;
  SavedHandle forward(uniep_group* group, const uniep_placement* placement, const char* schedule) const;
  uniep_status backward(uniep_group* group, const uniep_saved* saved, const char* schedule) const;
  // What makes all weight gradients later.
  std::vector<uniep_weight_gradient_arguments> gradient_arguments() const;

  const RandomLayer& source;
  cli::LayerResult result;
  std::vector<int64_t> ids64;
  std::vector<const void*> w1_experts, w2_experts;
  std::vector<void*> dw1_experts, dw2_experts;
  uniep_layer_config config{};
  std::vector<uniep_routing> routings;
  std::vector<uniep_weights> weights;
  std::vector<uniep_weight_gradients> gradients;
  std::vector<uniep_forward_arguments> forward_arguments;
  std::vector<uniep_backward_arguments> backward_arguments;
};

}  // namespace uniep::test
