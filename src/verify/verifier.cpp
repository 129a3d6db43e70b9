#include "uniep/verifier.h"

#include "api/check_arrays.h"
#include "api/check_call.h"
#include "verify/verifier_state.h"

namespace uniep {

using api::with_heap;

const char* finding_name(FindingKind kind) {
  switch (kind) {
    case FindingKind::kWrongRank:
      return "wrong rank";
    case FindingKind::kUndecided:
      return "wrong rank, undecided";
    case FindingKind::kChangedMemory:
      return "memory changed";
    case FindingKind::kChangedInputs:
      return "inputs changed";
    case FindingKind::kReplayed:
      return "inputs and results changed";
    case FindingKind::kNotFinite:
      return "not finite";
    case FindingKind::kOwnBug:
      return "own bug";
  }
  return "unknown";
}

Verifier::Verifier(Group& group, const VerifierOptions& options)
    : state_(with_heap([&] { return std::make_unique<internal::VerifierState>(group, options); })) {}
Verifier::~Verifier() = default;

bool Verifier::due(const std::string& layer, Direction direction) const {
  return state_->due(layer, direction);
}

void Verifier::after_forward(const VerifiedCall& given, std::span<const ForwardArguments> arguments,
                             const Saved& saved) {
  if (!saved.empty()) api::check_owner(saved.state(), state_->group, "saved");
  with_heap([&] { state_->see(given.layer); });
  if (!state_->due(given.layer, Direction::kForward)) return;
  with_heap([&] {
    state_->timed([&] {
      verify::NotedCall call = state_->begin_note(given, Direction::kForward, arguments.size());
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        const int rank = static_cast<int>(i);
        const bool has_tokens = given.routings[i].tokens > 0;
        api::check_array(arguments[i].x, "x", rank, has_tokens);
        api::check_array(arguments[i].y, "y", rank, has_tokens);
        api::check_weights(arguments[i].weights, given.config, rank, call.inputs.local_experts());
      }
      state_->group.synchronize();
      for (const ForwardArguments& own : arguments) {
        call.inputs.x.push_back(own.x);
        call.inputs.add_experts(own.weights);
        call.results.push_back(own.y);
      }
      call.made = verify::observe_forward(state_->group, call.inputs, arguments, saved);
      state_->note(std::move(call));
    });
  });
}

void Verifier::before_backward(const std::string& layer, const LayerConfig& config,
                               std::span<const BackwardArguments> arguments) {
  if (config.numerics.weight_gradient != WeightGradient::kMainGrad || arguments.empty()) return;
  if (arguments[0].weight_gradients != WeightGradientTime::kNow || !state_->due(layer, Direction::kBackward)) return;
  with_heap([&] {
    state_->timed([&] {
      const int64_t local_experts = config.shape.experts / state_->group.ranks();
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        api::check_dw1(arguments[i].gradients, config, static_cast<int>(i), local_experts);
        api::check_dw2(arguments[i].gradients, config, static_cast<int>(i), local_experts);
      }
      state_->group.synchronize();
      state_->start = verify::keep_gradients(state_->group, config, arguments, state_->expert_in_turn(config));
    });
  });
}

void Verifier::after_backward(const VerifiedCall& given, std::span<const BackwardArguments> arguments) {
  with_heap([&] { state_->see(given.layer); });
  if (!state_->due(given.layer, Direction::kBackward)) return;
  with_heap([&] {
    state_->timed([&] {
      verify::NotedCall call = state_->begin_note(given, Direction::kBackward, arguments.size());
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        const BackwardArguments& own = arguments[i];
        const int rank = static_cast<int>(i);
        const bool has_tokens = given.routings[i].tokens > 0;
        api::check_array(own.x, "x (of a call that is verified)", rank, has_tokens);
        api::check_array(own.dy, "dy", rank, has_tokens);
        api::check_array(own.dx, "dx", rank, has_tokens);
        api::check_array(own.dprobs, "dprobs", rank, has_tokens);
        api::check_weights(own.weights, given.config, rank, call.inputs.local_experts());
        if (own.weight_gradients != WeightGradientTime::kNow) continue;
        api::check_dw1(own.gradients, given.config, rank, call.inputs.local_experts());
        api::check_dw2(own.gradients, given.config, rank, call.inputs.local_experts());
      }
      state_->group.synchronize();
      for (const BackwardArguments& own : arguments) {
        call.inputs.x.push_back(own.x);
        call.inputs.dy.push_back(own.dy);
        call.inputs.add_experts(own.weights);
        call.results.push_back(own.dx);
      }
      const bool added = given.config.numerics.weight_gradient == WeightGradient::kMainGrad;
      call.gradients =
          arguments[0].weight_gradients == WeightGradientTime::kNow && (!added || state_->start.expert == call.expert);
      call.start = std::move(state_->start);
      call.made = verify::observe_backward(state_->group, call.inputs, arguments, call.gradients ? call.expert : -1);
      state_->note(std::move(call));
    });
  });
}

std::vector<Finding> Verifier::end_step() {
  return with_heap([&] { return state_->end_step(); });
}

VerifierCounts Verifier::counts() const {
  return state_->counts;
}

VerifierMemory Verifier::memory_need(const LayerConfig& config, Direction direction, int64_t tokens) const {
  const LayerShape& shape = config.shape;
  const std::size_t weights = static_cast<std::size_t>(3 * shape.intermediate * shape.hidden);
  const std::size_t rows = static_cast<std::size_t>(tokens * shape.hidden);
  const bool backward = direction == Direction::kBackward;
  const std::size_t element = config.numerics.weight_gradient == WeightGradient::kBFloat16 ? 2 : sizeof(float);
  const bool added = config.numerics.weight_gradient == WeightGradient::kMainGrad;
  VerifierMemory need;
  need.expert_bytes = weights * sizeof(BFloat16) + (backward ? weights * element * (added ? 2 : 1) : 0);
  need.result_bytes =
      rows * sizeof(BFloat16) * (backward ? 2 : 1) +
      static_cast<std::size_t>(tokens * shape.topk) * (sizeof(int32_t) + sizeof(float) * (backward ? 2 : 1));
  const std::size_t tiles_of_row = static_cast<std::size_t>((shape.hidden + kVerifiedColumns - 1) / kVerifiedColumns);
  const std::size_t z_tiles =
      static_cast<std::size_t>((2 * shape.intermediate + kVerifiedColumns - 1) / kVerifiedColumns);
  const std::size_t slots = static_cast<std::size_t>(tokens * shape.topk);
  need.host_bytes =
      3 * sizeof(uint64_t) *
      (static_cast<std::size_t>(tokens) * tiles_of_row + slots * (tiles_of_row + (backward ? 1 : z_tiles)));
  return need;
}

}  // namespace uniep
