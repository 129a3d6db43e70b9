#pragma once

#include <string>
#include <vector>

#include "engine/cuda/runtime/kernel_variant.h"

// Faults that are planted into the kernels' source, one at a time: a fence, a wait, a scope, a vote or a threshold less
// than there is. A test that sees none of one is missing, or what it breaks is needless.
namespace uniep::cuda::test {

struct KernelMutant {
  std::string name;
  std::string source;       // below engine/cuda/device, or of program/
  std::string text;         // what is there once
  std::string replacement;  // of it
  std::string breaks;
  std::string layer;       // of mutant_layers.h: whose bytes or waits tell of it
  int gpus = 1;            // where one GPU hides it
  std::string survives{};  // why no test can tell of it; else one must

  // It has the machine code of the kernels as they are.
  bool is_equivalent() const { return survives.starts_with("equivalent"); }
};

const std::vector<KernelMutant>& kernel_mutants();
// Throws uniep::Error (kInvalidArgument) where there is none of the name.
const KernelMutant& find_mutant(const std::string& name);

// Its kernels, with delays (disturbed_calls.h).
KernelVariant variant_of(const KernelMutant& mutant);

}  // namespace uniep::cuda::test
