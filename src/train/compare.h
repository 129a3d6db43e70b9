#pragma once

#include <string>

#include "train/trainer.h"

namespace uniep::train {

// The first place where two runs' losses, held-out losses or final weights differ in a bit, in words; empty when they
// are equal. Speeds do not count.
std::string first_difference(const RunRecord& a, const Parameters& a_weights, const RunRecord& b,
                             const Parameters& b_weights);

}  // namespace uniep::train
