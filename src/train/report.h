#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/text.h"
#include "train/trainer.h"

namespace uniep::train {

// One run of --compare against the run that was asked for.
struct Comparison {
  std::string name;  // how it ran
  int ranks = 1;
  std::string difference;  // the first, in words; empty: equal to the bit
};

struct Report {
  RunRecord record;
  int64_t first_step = 0;  // steps done before the run (by the run that wrote the checkpoint)
  int64_t last_step = 0;
  std::vector<Comparison> comparisons;

  bool all_equal() const;
};

// What --json writes; docs/training.md lists the keys.
nlohmann::ordered_json to_json(const Report& report, const Trainer& trainer, const Text& text);

// The same in a few lines for people.
std::string to_text(const Report& report, const Trainer& trainer, const Text& text);

}  // namespace uniep::train
