#include "uniep/tuner.h"

#include "tune/tuner_state.h"

namespace uniep {

Tuner::Tuner(TunerOptions options) : implementation_(std::make_unique<Implementation>(std::move(options))) {}
Tuner::~Tuner() = default;
Tuner::Tuner(Tuner&&) noexcept = default;
Tuner& Tuner::operator=(Tuner&&) noexcept = default;

TunerCall Tuner::schedule(int layer, Direction direction) {
  return implementation_->schedule(layer, direction);
}

const Schedule& Tuner::schedule_to_keep(int layer, Direction direction) {
  return implementation_->schedule_to_keep(layer, direction);
}

void Tuner::measured(const TunerCall& call, const CallTime& time) {
  implementation_->measured(call, time);
}

void Tuner::failed(const TunerCall& call, const std::string& reason) {
  implementation_->failed(call, reason);
}

void Tuner::not_measured(const TunerCall& call) {
  implementation_->not_measured(call);
}

void Tuner::step() {
  implementation_->step();
}

bool Tuner::wants_round() const {
  return implementation_->wants_round();
}

void Tuner::begin_round() {
  implementation_->begin_round();
}

void Tuner::freeze() {
  implementation_->freeze("asked for");
}

bool Tuner::frozen() const {
  return implementation_->frozen;
}

const Schedule& Tuner::incumbent(int layer, Direction direction) const {
  return implementation_->slot(layer, direction).search.incumbent();
}

const std::vector<TunerDecision>& Tuner::decisions() const {
  return implementation_->decisions;
}

TunerSpent Tuner::spent() const {
  return implementation_->spent();
}

int64_t Tuner::steps() const {
  return implementation_->steps;
}

std::vector<std::byte> Tuner::results() const {
  return implementation_->results();
}

void Tuner::add_results(std::span<const std::byte> bytes) {
  implementation_->add_results(bytes);
}

}  // namespace uniep
